"""A small run on disk."""

from pathlib import Path

import pytest

from helpers.small_run import write_small_run


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return write_small_run(tmp_path)
