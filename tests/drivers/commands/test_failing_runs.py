"""Live runs that an error ends: with exit code 1, its message alone, and in a state that can be resumed."""

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import worker_of
from helpers.small_run import train_here, wait_for_steps
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.data.rows import RowPrompts
from tailrace.types import Prompt

PIPELINERL = "groups_per_step = 2\nin_flight_per_engine = 8\nring_groups = 4\n"
STOPPED = """
import os, signal
from helpers.processes import loader_of, worker_of

class Stopping:
    def __init__(self, find):
        self.find = find

    def on(self, event):
        if isinstance(event, dict) and event.get("step") == 2 and "loss" in event:
            os.kill(self.find(os.getpid()), signal.SIGSTOP)

    def close(self):
        pass

def trainer(folder):
    return Stopping(lambda controller: worker_of(controller, "trainer"))

def scorer(folder):
    return Stopping(loader_of)
"""


def num_rounds_of(folder: Path) -> int:
    """The rounds that metrics.jsonl has begun."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return max(json.loads(line)["round"] for line in lines) + 1


@pytest.fixture
def broken_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Row 20 raises until the patch is undone."""
    sound = RowPrompts.__getitem__

    def broken(rows: RowPrompts, index: int) -> Prompt:
        if index == 20:
            raise TypeError("row 20")
        return sound(rows, index)

    with monkeypatch.context() as patch:
        patch.setattr(RowPrompts, "__getitem__", broken)
        yield patch


def test_a_row_that_raises_ends_the_run_which_goes_on_without_it(
    config_path: Path, broken_row: pytest.MonkeyPatch
) -> None:
    words = ("--run.rounds", "6", "--schedule.name", "serial")
    with pytest.raises(TypeError, match=r"^row 20$"):
        train_here(config_path, *words)
    broken_row.undo()
    assert train_here(config_path, *words, "--resume") == 0


def test_its_traceback_is_the_only_one_of_a_schedule_that_never_stops(
    config_path: Path, broken_row: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rolloutpipe = 'name = "rolloutpipe"\ngroups_per_round = 4\ngroups_per_step = 2\n'
    pipelinerl = f'name = "pipelinerl"\n{PIPELINERL}'
    config_path.write_text(config_path.read_text().replace(rolloutpipe, pipelinerl))
    with pytest.raises(TypeError, match=r"^row 20$"):
        train_here(config_path, "--run.rounds", "6")
    gc.collect()  # an exception that nobody has retrieved is told when it goes
    assert "Traceback" not in capfd.readouterr().err
    broken_row.undo()
    assert train_here(config_path, "--run.rounds", "6", "--resume") == 0


@pytest.mark.parametrize("name", ["trainer", "scorer"])
def test_a_worker_that_is_stopped_ends_the_run_which_can_be_resumed(
    config_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (config_path.parent / "stopped.py").write_text(STOPPED)
    words = ("--run.eval_every", "0", "--host.health_timeout_s", "1")
    sinks = f'["{config_path.parent}/stopped.py:{name}"]'
    assert train_here(config_path, *words, "--run.rounds", "1000", "--record.sinks", sinks) == 1
    worker = "trainer" if name == "trainer" else "scorer-0"
    said = f"tailrace: WorkerDied: {worker} was stopped for 1 s (host.health_timeout_s); {worker} (process"
    assert said in capfd.readouterr().err
    num_rounds = num_rounds_of(config_path.parent / "out") + 2  # it went on for a second
    assert train_here(config_path, *words, "--run.rounds", f"{num_rounds}", "--resume") == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_that_is_full_while_workers_start_is_not_taken_for_a_wrong_model(
    config_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(config_path.parent / "out")
    folder.claim("train")
    (folder.path / "logs").mkdir()
    (folder.path / "logs" / "trainer.log").symlink_to("/dev/full")
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
    assert [line.split()[1] for line in said] == ["loads", "reward:", "the", "the", "WorkerDied:"]
    assert said[4].startswith("tailrace: WorkerDied: trainer (process ")
    assert "Traceback" not in err and "never retrieved" not in err
