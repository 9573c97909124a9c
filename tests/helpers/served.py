"""`tailrace serve`: a process, or a thread of this process, whose fork server has imported torch already."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from helpers.processes import workers_of
from tailrace.cli import main
from tailrace.extras.http.engine import TOKEN_VARIABLE

TOKEN = "a-token-of-the-tests"


@contextmanager
def served(model: Path, *options: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run `tailrace serve` on a free port, as a process that a signal ends. Yields the URL, too."""
    command = [sys.executable, "-m", "tailrace.cli", "serve", str(model), "--port", "0", *options]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        label, url = process.stdout.readline().split()
        assert label == "serving"
        yield url, process
    finally:
        process.terminate()
        assert process.wait() in (1, 143)
        process.stdout.close()  # type: ignore[union-attr]


@contextmanager
def served_here(model: Path, *options: str) -> Iterator[str]:
    """Run `tailrace serve` on a free port, in a thread. The death of its engine ends it. Yields the URL."""
    before = workers_of(os.getpid(), "engine")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        (token := Path(folder) / "token").write_text(TOKEN)
        words = ["serve", str(model), "--port", str(port), "--token-file", str(token), *options]
        serving = thread.submit(main, words)
        _wait_until_it_listens(port, serving)
        (engine,) = workers_of(os.getpid(), "engine") - before
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.kill(engine, signal.SIGKILL)
            assert serving.result(timeout=60) == 1


def _wait_until_it_listens(port: int, serving: Future[int]) -> None:
    with socket.socket() as client:
        while client.connect_ex(("127.0.0.1", port)):
            assert not serving.done(), serving.result()
            time.sleep(0.01)
