"""An inference server that a run starts, with a small server in its place."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from helpers.worker_cases import is_running
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.errors import WorkerDied
from tailrace.extras.http.server import ManagedServer, ServerJob, free_port

SERVER = """
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"%d %d" % (os.getpid(), engine.pid))

engine = subprocess.Popen(["setsid", "sleep", "1000"])  # a process of another group, as servers start them
print(os.environ.get("COLOUR"), os.environ.get("PYTHONPATH"), flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def spawn(code: str, logs: Path, start_timeout_s: float = 60.0) -> ManagedServer:
    port = free_port()
    job = ServerJob(command=(sys.executable, "-c", code, str(port)), env={"COLOUR": "red"})
    return await ManagedServer.start("engine-3", job, LocalSpawner(logs), port, start_timeout_s)


async def pids(server: ManagedServer) -> list[int]:
    """The process of the server, and the one that it has started."""
    async with httpx.AsyncClient(trust_env=False) as client:
        return [int(word) for word in (await client.get(server.url)).text.split()]


async def until_gone(pid: int) -> None:
    while is_running(pid):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_server_is_ready_once_it_answers_and_ends_with_all_it_started(tmp_path: Path) -> None:
    server = await spawn(SERVER, tmp_path)
    await server.ready()
    running = await pids(server)
    assert all(map(is_running, running))
    await server.close()
    assert not any(map(is_running, running))
    assert (tmp_path / "engine-3.log").read_text().split("\n")[0] == "red None"


async def test_a_server_that_is_killed_tells_how_and_leaves_nothing(tmp_path: Path) -> None:
    server = await spawn(SERVER, tmp_path)
    await server.ready()
    own, started = await pids(server)
    os.kill(own, signal.SIGKILL)
    assert "engine-3" in (words := await server.died())
    assert "ended: signal SIGKILL" in words
    await server.close()
    await until_gone(started)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent is found in /proc")
async def test_a_server_ends_when_its_parent_alone_is_killed(tmp_path: Path) -> None:
    server = await spawn(SERVER, tmp_path)
    await server.ready()
    own, elsewhere = await pids(server)
    parent = int(Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    await until_gone(own)
    os.kill(elsewhere, signal.SIGKILL)  # it is in a session of its own
    await server.close()


async def test_a_server_that_cannot_start_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = await spawn("raise SystemExit('no such model')", tmp_path)
    with pytest.raises(WorkerDied, match=r"engine-3 .* ended: exit code 1; the end of .*\nno such model"):
        await server.ready()
    await server.close()


async def test_a_server_that_does_not_answer_in_time_is_an_error(tmp_path: Path) -> None:
    server = await spawn("import time; time.sleep(1000)", tmp_path, start_timeout_s=0.1)
    problem = r"engine-3 did not answer within 0\.1 s \(engine\.start_timeout_s\); it printed nothing"
    with pytest.raises(WorkerDied, match=problem):
        await server.ready()
    await server.close()


CONTROLLER = f"""
import asyncio, os, signal, sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
from test_server import SERVER, pids, spawn

async def main():
    server = await spawn(SERVER, Path(sys.argv[1]))
    await server.ready()
    print(*await pids(server), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these signals")
@pytest.mark.slow  # tests/drivers/workers/test_process.py kills a controller that has only stand-ins
async def test_a_server_ends_when_the_controller_is_killed(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", CONTROLLER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 2
    for pid in map(int, done.stdout.split()):
        await until_gone(pid)
