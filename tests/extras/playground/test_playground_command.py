"""`tailrace playground` in a process of its own."""

import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tailrace.cli import main


def test_a_folder_is_served_on_this_machine_until_a_signal_comes(tmp_path: Path) -> None:
    for name in ("index.html", "first.json", "core.mjs", "core.wasm"):
        (tmp_path / name).write_text(name)
    words = [sys.executable, "-m", "tailrace.cli", "playground", "--folder", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        address = process.stdout.readline().split()[1]
        assert address.startswith("http://127.0.0.1:")
        kinds = {}
        for name in ("", "core.mjs", "core.wasm"):
            with urlopen(address + name) as reply:
                kinds[reply.read().decode()] = reply.headers["Content-Type"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == "tailrace: the playground is no longer served\n"
    assert kinds == {
        "index.html": "text/html",
        "core.mjs": "text/javascript",
        "core.wasm": "application/wasm",
    }


def test_a_folder_without_a_playground_and_a_port_in_use_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["playground", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"tailrace: --folder = '{tmp_path}': there is no playground in it; "
        "run `make playground` in a checkout, or name the folder that it wrote\n"
    )
    for name in ("index.html", "first.json"):
        (tmp_path / name).touch()
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert main(["playground", "--folder", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port = {port}: the server cannot listen there" in capsys.readouterr().err
