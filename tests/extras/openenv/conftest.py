"""Servers of the game, each a process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore = [] if find_spec("openenv") else ["test_openenv_episodes.py", "guess_server.py"]


@contextmanager
def guess_server(sessions: int) -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("guess_server.py")), str(sessions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[int], str]]:
    """Starts a server for so many sessions, and returns its address."""
    with ExitStack() as stack:
        known: dict[int, str] = {}

        def started(sessions: int) -> str:
            if sessions not in known:
                known[sessions] = stack.enter_context(guess_server(sessions))
            return known[sessions]

        yield started
