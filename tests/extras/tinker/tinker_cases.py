"""A server of Tinker's API."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

QUICKSTART = Path(__file__).parent.parent.parent.parent / "examples" / "quickstart" / "model"
BASE, KEY = "quickstart", "tml-a-key-of-the-tests"


class Server:
    """`tailrace serve --tinker` on one port, in one folder, over several lives."""

    def __init__(self, model: Path, folder: Path, *options: str, name: str = BASE) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url, self.folder = f"http://127.0.0.1:{self._port}", folder
        self._words = [str(model), "--tinker", "--served-model-name", name, "--port", str(self._port)]
        self._words += ["--state-folder", str(folder), *options]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        environment = {**os.environ, "TAILRACE_TOKEN": KEY}
        command = [sys.executable, "-m", "tailrace.cli", "serve", *self._words]
        self._process = process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["serving", self.url]

    def kill(self) -> None:
        """SIGKILL; its workers end when they see that it is gone."""
        self._running().kill()
        self._closed()

    def stop(self) -> int:
        self._running().terminate()
        return self._closed()

    def _running(self) -> "subprocess.Popen[str]":
        assert self._process is not None
        return self._process

    def _closed(self) -> int:
        process = self._running()
        assert process.stdout is not None
        process.stdout.close()
        return process.wait()


@contextmanager
def clients_of(server: Server) -> Iterator[Callable[[], Any]]:
    """Makes clients of a server. They are closed at the end."""
    tinker = pytest.importorskip("tinker")
    made: list[Any] = []

    def make() -> Any:
        made.append(client := tinker.ServiceClient(base_url=server.url, api_key="tml-any"))
        return client

    try:
        yield make
    finally:
        for client in made:
            client.close("success").result()


@contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    server = Server(model, folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
