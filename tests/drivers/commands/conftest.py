"""A run that has ended."""

from pathlib import Path

import pytest

from helpers.small_run import train_here, write_small_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run of one round. Tests only read it."""
    config = write_small_run(tmp_path_factory.mktemp("trained"))
    assert train_here(config, "--run.rounds", "1") == 0
    return config.parent / "out"
