"""Tiny models, that of the tests of workers among them, and short waits."""

from pathlib import Path

import pytest
from tests.drivers.workers.conftest import model_path

from helpers.tiny_models import save_tiny_model
from tailrace.drivers.engine import supervised
from tailrace.extras.http import engine

__all__ = ["model_path"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of letters. Tests only read it."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look sooner after a server that has failed."""
    monkeypatch.setattr(engine, "RETRY_S", 0.01)
    monkeypatch.setattr(supervised, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervised, "TRANSFER_PAUSE_S", 0.01)
