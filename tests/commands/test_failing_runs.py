"""Live runs that an error ends: with exit code 1, its message alone, and in a state that can be resumed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.processes import loader_of, worker_of
from helpers.small_run import wait_for_steps

SCHEDULES = {
    "serial": "groups_per_round = 4\ngroups_per_step = 2\n",
    "pipelinerl": "groups_per_step = 2\nin_flight_per_engine = 8\nring_groups = 4\n",
}
BROKEN_ROW = """
import sys
from tailrace.cli import main
from tailrace.data.rows import RowPrompts

sound = RowPrompts.__getitem__

def broken(rows, index):
    if index == 20:
        raise TypeError("row 20")
    return sound(rows, index)

RowPrompts.__getitem__ = broken
sys.exit(main())
"""


MAIN = "from tailrace.cli import main; exit(main())"


@contextmanager
def training(config: Path, *words: str, code: str = MAIN) -> "Iterator[subprocess.Popen[str]]":
    """A process that trains. It is killed if it has not ended with the block."""
    command = [sys.executable, "-c", code, "train", str(config), "--output-dir", str(config.parent / "out")]
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_row_that_raises_ends_the_run_which_goes_on_without_it(config_path: Path, schedule: str) -> None:
    text = config_path.read_text().replace('"rolloutpipe"', f'"{schedule}"')
    for line in SCHEDULES["serial"].splitlines():
        text = text.replace(f"{line}\n", "")
    config_path.write_text(text.replace("[schedule]", f"[schedule]\n{SCHEDULES[schedule]}"))
    with training(config_path, "--run.rounds", "12", code=BROKEN_ROW) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.count("Traceback") == 1 and err.endswith("\nTypeError: row 20\n"), err
    with training(config_path, "--run.rounds", "12", "--resume") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


@pytest.mark.parametrize("name", ["trainer", "scorer-0"])
def test_a_worker_that_is_stopped_ends_the_run_which_can_be_resumed(config_path: Path, name: str) -> None:
    words = ("--run.rounds", "8", "--host.health_timeout_s", "1")
    with training(config_path, *words) as process:
        wait_for_steps(config_path.parent / "out", 4, process)
        stopped = worker_of(process.pid, name) if name == "trainer" else loader_of(process.pid)
        os.kill(stopped, signal.SIGSTOP)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"tailrace: WorkerDied: {name} was stopped for 1 s (host.health_timeout_s); {name} (process" in err
    with training(config_path, *words, "--resume") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_that_is_full_while_workers_start_is_not_taken_for_a_wrong_model(config_path: Path) -> None:
    logs = config_path.parent / "out" / "logs"
    logs.mkdir(parents=True)
    (logs / "trainer.log").symlink_to("/dev/full")
    with training(config_path) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.endswith(
        "tailrace: DiskFull: [Errno 28] No space left on device; make room on the disk, then --resume\n"
    )


def test_the_death_of_a_worker_is_the_only_message(config_path: Path) -> None:
    with training(config_path, "--run.rounds", "1000", "--run.checkpoint_every", "0") as process:
        wait_for_steps(config_path.parent / "out", 3, process)
        os.kill(worker_of(process.pid, "trainer"), signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    said = [line for line in err.splitlines() if line.startswith("tailrace: ")]
    assert said[0].startswith("tailrace: reward: ")
    assert said[1].startswith("tailrace: WorkerDied: trainer (process ")
    assert "Traceback" not in err and "never retrieved" not in err
