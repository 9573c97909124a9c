"""The tasksets of this folder are importable by their names, as installed ones are."""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

TASKSETS = str(Path(__file__).parent / "tasksets")
sys.path.append(TASKSETS)

collect_ignore = [] if find_spec("verifiers") else ["test_taskset_episodes.py"]


@pytest.fixture(autouse=True)
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """What the tool servers of scratchpad were asked, which verifiers starts as programs."""
    log = tmp_path / "called"
    log.touch()
    monkeypatch.setenv("SCRATCHPAD_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((TASKSETS, os.environ.get("PYTHONPATH", ""))))
    return lambda: log.read_text().splitlines()
