"""Workers that are forked: each is as if it had been started anew."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stand_in import StandInJob
from worker_cases import until_gone, words_of

from tailrace.devices import Devices
from tailrace.errors import WorkerDied
from tailrace.workers.forked import Forked, ForkServer, Start
from tailrace.workers.messages import Done, Job, Ready
from tailrace.workers.process import WorkerProcess, _environment, forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
Execute = Callable[[Any], Any]


async def spawn(module: str, logs: Path, devices: Devices | None = None) -> WorkerProcess:
    decoder = msgspec.msgpack.Decoder(Done | Ready)
    job = StandInJob(threads=2, manner="obey") if module == "stand_in" else Job(threads=2)
    return await WorkerProcess.spawn(
        "a-worker-of-a-long-name", module, job, decoder, logs=logs, devices=devices, begin=forked
    )


def test_a_worker_has_the_environment_the_folder_and_the_devices_of_its_own_start(
    tmp_path: Path, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no socket but its own, though others run."""
    cpu = min(os.sched_getaffinity(0))

    async def main() -> None:
        with pytest.raises(WorkerDied, match="exit code 7"):
            await (await spawn("tells", tmp_path / "first")).died()
        beside = await spawn("stand_in", tmp_path / "beside")
        await beside.answered(beside.next_answer(), Ready, "start")
        monkeypatch.setenv("NEW", "1")
        monkeypatch.delenv("OLD")
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        worker = await spawn("tells", tmp_path / "second", Devices(cpus=(cpu,), gpus=(3, 1)))
        with pytest.raises(WorkerDied, match=rf"\(process {worker.pid}\) ended: exit code 7"):
            await worker.died()
        assert json.loads(words_of(tmp_path / "second", "a-worker-of-a-long-name")) == {
            "pid": worker.pid,
            "group": worker.pid,
            "name": "a-worker-of-a-l",
            "folder": str(tmp_path),
            "cpus": [cpu],
            "torch threads": 2,
            "sockets": 1,
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "passive",
            "CUDA_VISIBLE_DEVICES": "3,1",
            "NEW": "1",
            "OLD": None,
        }
        assert not beside.has_ended
        await beside.close()

    monkeypatch.setenv("OLD", "1")
    execute(main())


def test_a_module_that_cannot_be_imported_is_in_the_log(tmp_path: Path, execute: Execute) -> None:
    async def main() -> None:
        with pytest.raises(WorkerDied, match=r"(?s)exit code 1; .*No module named 'no_such_module'"):
            await (await spawn("no_such_module", tmp_path)).died()

    execute(main())


def test_a_module_that_initialises_cuda_when_it_is_imported_is_refused(
    tmp_path: Path, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(ForkServer, "_shared", {})
        message = "(?s)exit code 1; .*a module that takes_cuda imports has initialised CUDA"
        with pytest.raises(WorkerDied, match=message):
            await (await spawn("takes_cuda", tmp_path)).died()

    execute(main())


def test_a_server_is_shared_within_a_thread_by_starts_with_the_same_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries read some when they are imported, and a server ends with the thread that has started it."""
    monkeypatch.setattr(ForkServer, "_shared", {})
    with (tmp_path / "log").open("wb") as log:

        def shared(variables: dict[str, str]) -> ForkServer:
            return ForkServer.shared({**os.environ, **variables}, log.fileno())

        first = shared({"ANY": "1"})
        offline = shared({"HF_HUB_OFFLINE": "0"})
        with ThreadPoolExecutor(1) as thread:
            elsewhere = thread.submit(shared, {"ANY": "1"}).result()
        assert shared({"ANY": "2"}) is first
        assert len({first, offline, elsewhere}) == 3
        for server in (first, offline, elsewhere):
            server.kill()


async def fork(server: ForkServer, log: int) -> Forked:
    """A worker that waits for ever."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        start = Start("worker", "stand_in", "start for ever", 1, dict(os.environ), sys.path, os.getcwd(), [])
        return await server.fork(start, theirs, log)


def test_a_server_that_is_killed_takes_its_workers_along_and_is_replaced(
    tmp_path: Path, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(ForkServer, "_shared", {})
        with (tmp_path / "log").open("wb") as log:
            environment = _environment(1, Devices())
            server = ForkServer.shared(environment, log.fileno())
            workers = [await fork(server, log.fileno()) for _ in range(2)]
            os.kill(server._process.pid, signal.SIGKILL)
            assert [await worker.wait() for worker in workers] == [-signal.SIGKILL] * 2
            await until_gone(*(worker.pid for worker in workers))
            with pytest.raises(EOFError):
                await fork(server, log.fileno())
            replacement = ForkServer.shared(environment, log.fileno())
            assert replacement is not server
            last = await fork(replacement, log.fileno())
            assert replacement.kill() == -signal.SIGKILL
            assert await last.wait() == -signal.SIGKILL

    execute(main())


IDLE = """
import socket
from tailrace.workers import fork_server
fork_server.IDLE_S = 0.1
_held, theirs = socket.socketpair()
print(fork_server.serve(theirs))
"""


def test_a_server_without_workers_ends_by_itself() -> None:
    ended = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("None\n", "")


def test_a_worker_whose_start_is_cancelled_ends_and_the_next_one_starts(
    tmp_path: Path, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started() -> WorkerProcess:
        worker = await spawn("stand_in", tmp_path)
        await worker.answered(worker.next_answer(), Ready, "start")
        return worker

    monkeypatch.setattr(ForkServer, "_shared", {})

    async def main() -> None:
        first = await started()
        (server,) = {each._process.pid for each in ForkServer._shared.values()}
        children = Path(f"/proc/{server}/task/{server}/children")
        for num_turns in range(6):
            starting = asyncio.create_task(spawn("stand_in", tmp_path))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await (await starting).close()
            last = await started()
            while set(children.read_text().split()) != {str(first.pid), str(last.pid)}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await last.close()
        await first.close()
        os.kill(server, signal.SIGKILL)

    execute(main())
