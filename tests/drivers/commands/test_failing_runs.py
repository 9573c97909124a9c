"""Live runs that an error ends: with exit code 1, its message alone, and in a state that can be resumed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import loader_of, worker_of
from helpers.small_run import train_here, wait_for_steps
from tailrace.drivers.data.rows import RowPrompts
from tailrace.types import Prompt

PIPELINERL = "groups_per_step = 2\nin_flight_per_engine = 8\nring_groups = 4\n"
BROKEN_ROW = """
import sys
from tailrace.cli import main
from tailrace.drivers.data.rows import RowPrompts

sound = RowPrompts.__getitem__

def broken(rows, index):
    if index == 20:
        raise TypeError("row 20")
    return sound(rows, index)

RowPrompts.__getitem__ = broken
sys.exit(main())
"""


def test_a_row_that_raises_ends_the_run_which_goes_on_without_it(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = RowPrompts.__getitem__

    def broken(rows: RowPrompts, index: int) -> Prompt:
        if index == 20:
            raise TypeError("row 20")
        return sound(rows, index)

    words = ("--run.rounds", "8", "--schedule.name", "serial")
    with monkeypatch.context() as patch, pytest.raises(TypeError, match=r"^row 20$"):
        patch.setattr(RowPrompts, "__getitem__", broken)
        train_here(config_path, *words)
    assert train_here(config_path, *words, "--resume") == 0


def test_its_traceback_is_the_only_one_of_a_schedule_that_never_stops(config_path: Path) -> None:
    rolloutpipe = 'name = "rolloutpipe"\ngroups_per_round = 4\ngroups_per_step = 2\n'
    pipelinerl = f'name = "pipelinerl"\n{PIPELINERL}'
    config_path.write_text(config_path.read_text().replace(rolloutpipe, pipelinerl))
    words = ["train", str(config_path), "--output-dir", str(config_path.parent / "out"), "--run.rounds", "12"]
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_ROW, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and done.stderr.endswith("\nTypeError: row 20\n"), done.stderr
    assert train_here(config_path, "--run.rounds", "12", "--resume") == 0


@pytest.mark.parametrize("name", ["trainer", "scorer-0"])
def test_a_worker_that_is_stopped_ends_the_run_which_can_be_resumed(
    config_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    # a round takes 0.05 s: with few of them the run may end before its worker is stopped
    words = ("--run.rounds", "40", "--run.eval_every", "0", "--host.health_timeout_s", "1")

    def stop() -> None:
        wait_for_steps(config_path.parent / "out", 4)
        stopped = worker_of(os.getpid(), name) if name == "trainer" else loader_of(os.getpid())
        os.kill(stopped, signal.SIGSTOP)

    assert train_here(config_path, *words, meanwhile=stop) == 1
    said = f"tailrace: WorkerDied: {name} was stopped for 1 s (host.health_timeout_s); {name} (process"
    assert said in capfd.readouterr().err
    assert train_here(config_path, *words, "--resume") == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_that_is_full_while_workers_start_is_not_taken_for_a_wrong_model(
    config_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = config_path.parent / "out" / "logs"
    logs.mkdir(parents=True)
    (logs / "trainer.log").symlink_to("/dev/full")
    assert train_here(config_path) == 1
    assert capfd.readouterr().err.endswith(
        "tailrace: DiskFull: [Errno 28] No space left on device; make room on the disk, then --resume\n"
    )


def test_the_death_of_a_worker_is_the_only_message(
    config_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill() -> None:
        wait_for_steps(config_path.parent / "out", 3)
        os.kill(worker_of(os.getpid(), "trainer"), signal.SIGKILL)

    words = ("--run.rounds", "1000", "--run.checkpoint_every", "0")
    assert train_here(config_path, *words, meanwhile=kill) == 1
    err = capfd.readouterr().err
    said = [line for line in err.splitlines() if line.startswith("tailrace: ")]
    assert [line.split()[1] for line in said] == ["loads", "reward:", "the", "WorkerDied:"]
    assert said[3].startswith("tailrace: WorkerDied: trainer (process ")
    assert "Traceback" not in err and "never retrieved" not in err
