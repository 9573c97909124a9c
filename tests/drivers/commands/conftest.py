"""Small runs on disk."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.processes import children_of
from helpers.small_run import start_training, wait_for_steps, write_small_run


@pytest.fixture(scope="session")
def terminated(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A run in `out`, beside its config, that SIGTERM ended in its first round. The signal went to its
    workers, to its process group and, as from GNU timeout, once more to itself."""
    config = write_small_run(tmp_path_factory.mktemp("terminated"))
    folder = config.parent / "out"
    process = start_training(config, folder)
    wait_for_steps(folder, 3, process)
    children = children_of(process.pid)
    for pid in [*children, *(worker for child in children for worker in children_of(child))]:
        os.kill(pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([str(folder)], process.returncode, out, err)


@pytest.fixture(scope="session")
def interrupted(terminated: subprocess.CompletedProcess[str]) -> Path:
    """The output directory of that run. Tests only read it."""
    return Path(terminated.args[0])
