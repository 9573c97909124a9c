"""Whether a run goes on."""

import fcntl
import os
from pathlib import Path

import pytest

from tailrace.page.state import state_of


def touch(path: Path, time_s: float) -> None:
    path.touch()
    os.utime(path, (time_s, time_s))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that last wrote at 1,000 s."""
    touch(tmp_path / "trace.json", 1000.0)
    touch(tmp_path / "metrics.jsonl", 900.0)
    return tmp_path


def test_a_run_is_finished_when_its_summary_is_the_newest_file(folder: Path) -> None:
    touch(folder / "summary.json", 950.0)  # of an earlier life
    assert state_of(folder, 1002.0) == ("written", "is being written")
    assert state_of(folder, 1100.0, is_closed=True) == ("finished", "finished")  # a copy
    touch(folder / "summary.json", 1000.0)
    assert state_of(folder, 1001.0) == ("finished", "finished")


def test_silence_without_a_lock_has_no_known_reason(folder: Path) -> None:
    assert state_of(folder, 1020.0) == ("silent", "not finished, and nothing was written for 20 s")


def test_a_run_whose_lock_is_free_has_ended(folder: Path) -> None:
    touch(folder / "lock", 10.0)
    assert state_of(folder, 1010.0) == ("written", "is being written")
    assert state_of(folder, 1020.0) == ("ended", "ended without closing")


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="locks are not listed here")
def test_a_run_whose_lock_is_held_starts_writes_or_is_blocked(folder: Path) -> None:
    touch(folder / "lock", 10.0)
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state_of(folder, 1010.0) == ("written", "is being written")
        said = f"process {os.getpid()} lives, but nothing was written for 20 s"
        assert state_of(folder, 1020.0) == ("blocked", said)
        touch(folder / "lock", 1010.0)
        said = f"process {os.getpid()} has been starting its workers for 10 s; see logs/"
        assert state_of(folder, 1020.0) == ("starting", said)
    assert state_of(folder, 1020.0).kind == "ended"
