"""How a worker process is started, watched and ended."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import tells

from helpers.processes import start_controller
from helpers.stand_in import StandIn, StandInJob
from helpers.worker_cases import is_running, until_gone, words_of
from tailrace import clock
from tailrace.devices import Devices
from tailrace.drivers.workers import calls
from tailrace.drivers.workers import process as process_module
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.process import LocalSpawner, Method, environment, work
from tailrace.drivers.workers.process_tree import parent_of
from tailrace.drivers.workers.worker import Job, Worker, WorkerConnection
from tailrace.errors import WorkerDied

both_ways = pytest.mark.parametrize(
    "method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Method:
    """How workers are started in this test."""
    monkeypatch.setattr(process_module, "_method", lambda: request.param)
    return request.param


async def start(
    manner: str,
    logs: Path,
    devices: Devices | None = None,
    ready: bool = True,
    health_timeout_s: float | None = None,
) -> RemoteWorker:
    job = StandInJob.model_validate({"manner": manner, "threads": 3, "health_timeout_s": health_timeout_s})
    worker = await LocalSpawner(logs).start("worker-7", StandIn, job, devices)
    if ready:
        await worker.ready()
    return worker


async def test_answers_come_in_the_order_of_the_questions(tmp_path: Path) -> None:
    worker = await start("obey", tmp_path)
    assert await asyncio.gather(*(worker.call(StandIn.obey) for _ in range(100))) == [None] * 100
    await worker.close()
    assert words_of(tmp_path, "worker-7").count("was asked to obey") == 100


async def test_an_answer_nobody_waits_for_any_more_is_not_the_next_ones(tmp_path: Path) -> None:
    worker = await start("obey", tmp_path)
    forgotten = asyncio.create_task(worker.call(StandIn.obey))
    await asyncio.sleep(0)
    forgotten.cancel()
    assert await worker.call(StandIn.obey) is None
    assert await worker.call(StandIn.obey) is None
    await worker.close()


@both_ways
@pytest.mark.usefixtures("method")
async def test_an_exception_in_a_worker_is_raised_with_its_name_its_cause_and_its_traceback(
    tmp_path: Path,
) -> None:
    worker = await start("raise", tmp_path)
    with pytest.raises(WorkerDied) as died:
        await worker.call(StandIn.obey)
    words = str(died.value)
    assert words.startswith(
        f"worker-7 (process {worker.process.pid}) ended: exit code 1; the end of {tmp_path}"
    )
    assert "Traceback (most recent call last)" in words
    assert words.endswith("ValueError: the model melted")
    with pytest.raises(WorkerDied, match="the model melted"):
        await worker.call(StandIn.obey)
    await worker.close()


async def test_an_exception_in_a_thread_of_a_worker_ends_it_as_one_in_the_main_thread(tmp_path: Path) -> None:
    worker = await start("obey", tmp_path)
    with pytest.raises(WorkerDied, match=r"(?s)worker-7 .* ended: exit code 1; .*the helper melted"):
        await asyncio.wait_for(worker.call(StandIn.help), 30)
    await worker.close()


async def test_the_end_of_the_log_is_of_this_process_not_of_a_run_before(tmp_path: Path) -> None:
    (tmp_path / "worker-7.log").write_text("words of yesterday\n")
    worker = await start("obey", tmp_path)
    worker.kill()
    with pytest.raises(WorkerDied, match="ended: signal SIGKILL; it printed nothing"):
        await worker.call(StandIn.obey)
    assert words_of(tmp_path, "worker-7") == "words of yesterday\n"


@both_ways
@pytest.mark.usefixtures("method")
async def test_a_killed_worker_fails_every_open_call(tmp_path: Path) -> None:
    worker = await start("work for ever", tmp_path)
    calls = [asyncio.create_task(worker.call(StandIn.obey)) for _ in range(3)]
    await asyncio.sleep(0.1)
    assert clock.who_waits() == "worker-7: obey"
    os.kill(worker.process.pid, signal.SIGKILL)
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [WorkerDied] * 3
    assert all("signal SIGKILL" in str(error) for error in errors)
    with pytest.raises(WorkerDied, match="worker-7"):
        await worker.died()


async def test_words_that_cannot_be_read_end_the_worker_with_the_reason(tmp_path: Path) -> None:
    worker = await start("babble", tmp_path)
    with pytest.raises(WorkerDied, match="could not handle its message: DecodeError") as died:
        await worker.call(StandIn.obey)
    assert isinstance(died.value.__cause__, msgspec.DecodeError)


@both_ways
@pytest.mark.usefixtures("method")
async def test_a_worker_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CLOSE_S", 0.1)
    worker = await start("stay", tmp_path)
    await worker.close()
    await until_gone(worker.process.pid)


async def test_a_worker_ignores_ctrl_c(tmp_path: Path) -> None:
    worker = await start("obey", tmp_path)
    os.kill(worker.process.pid, signal.SIGINT)
    assert await worker.call(StandIn.obey) is None
    await worker.close()


@both_ways
@pytest.mark.usefixtures("method")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")
async def test_a_pinned_worker_stays_on_its_cpu(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    worker = await start("obey", tmp_path, Devices(cpus=(cpu,)))
    assert os.sched_getaffinity(worker.process.pid) == {cpu}
    await worker.close()


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from test_process import start
from helpers.stand_in import StandIn
from tailrace.drivers.workers import process

process._method = lambda: sys.argv[2]

async def main():
    workers = []
    for folder in (Path(sys.argv[1]) / "running", Path(sys.argv[1]) / "stopped"):
        for manner in ("obey", "work for ever"):
            workers.append(await start(manner, folder / manner))
            workers[-1].begin(StandIn.obey)
        workers.append(await start("start for ever", folder / "starting", ready=False))
        await workers[-1].connected()
    await asyncio.sleep(0.1)
    print(*(worker.process.pid for worker in workers), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@both_ways
async def test_workers_end_when_their_controller_is_killed(tmp_path: Path, method: Method) -> None:
    """While they wait, work, are still starting, and while they are stopped."""
    controller, words = await start_controller(CONTROLLER, tmp_path, method)
    pids = [int(pid) for pid in words]
    assert len(pids) == 6 and all(is_running(pid) for pid in pids)
    for pid in pids[3:]:
        os.kill(pid, signal.SIGSTOP)
    controller.kill()
    await until_gone(*pids)
    await controller.communicate()


@both_ways
@pytest.mark.usefixtures("method")
async def test_a_stopped_worker_is_closed_as_any_other(tmp_path: Path) -> None:
    worker = await start("obey", tmp_path)
    os.kill(worker.process.pid, signal.SIGSTOP)
    await worker.close()
    with pytest.raises(WorkerDied, match="ended: exit code 0"):
        await worker.died()


@both_ways
@pytest.mark.usefixtures("method")
async def test_a_worker_that_is_stopped_too_long_is_ended_and_one_that_computes_is_not(
    tmp_path: Path,
) -> None:
    worker = await start("work for ever", tmp_path, health_timeout_s=0.5)
    worker.begin(StandIn.obey)
    await asyncio.sleep(1)
    assert not worker.has_ended
    os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(
        WorkerDied, match=r"^worker-7 was stopped for 0\.5 s \(host\.health_timeout_s\); .* SIGKILL"
    ):
        await worker.died()


async def test_a_worker_is_closed_also_if_the_process_that_forked_it_is_stopped(tmp_path: Path) -> None:
    worker = await start("obey", tmp_path)
    server = parent_of(worker.process.pid)
    assert server != os.getpid()
    os.kill(server, signal.SIGSTOP)
    try:
        await asyncio.wait_for(worker.close(), 20)
    finally:
        os.kill(server, signal.SIGCONT)
    with pytest.raises(WorkerDied, match="ended: exit code 0"):
        await worker.died()


async def test_a_death_is_noticed_with_its_cause_while_the_fork_server_is_stopped(tmp_path: Path) -> None:
    worker = await start("work for ever", tmp_path)
    os.kill(server := parent_of(worker.process.pid), signal.SIGSTOP)
    try:
        call = worker.begin(StandIn.obey)
        os.kill(worker.process.pid, signal.SIGTERM)  # it is ignored
        os.kill(worker.process.pid, signal.SIGUSR1)
        with pytest.raises(WorkerDied, match="ended: signal SIGUSR1"):
            await asyncio.wait_for(call, 20)
        await asyncio.wait_for(worker.close(), 20)
    finally:
        os.kill(server, signal.SIGCONT)


def test_a_resource_tracker_that_is_stopped_ends_with_its_controller() -> None:
    script = """
import os, signal
from multiprocessing.resource_tracker import _resource_tracker
from tailrace.drivers.workers.process import preload
preload()
os.kill(_resource_tracker._pid, signal.SIGSTOP)
print(_resource_tracker._pid)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=60)
    tracker = int(done.stdout)
    try:
        asyncio.run(asyncio.wait_for(until_gone(tracker), 10))
    finally:
        with suppress(ProcessLookupError):
            os.kill(tracker, signal.SIGKILL)


@pytest.mark.slow  # it imports torch for three fork servers
async def test_a_fork_server_that_is_stopped_too_long_is_ended_with_its_workers_and_replaced(
    tmp_path: Path,
) -> None:
    worker = await start("obey", tmp_path, health_timeout_s=0.5)
    os.kill(server := parent_of(worker.process.pid), signal.SIGSTOP)
    why = rf"worker-7 was killed: its fork server \(process {server}\) was stopped for 0.5 s \(host.health_"
    with pytest.raises(WorkerDied, match=why):
        await asyncio.wait_for(worker.died(), 20)
    await until_gone(server)
    worker = await start("obey", tmp_path)
    os.kill(parent_of(worker.process.pid), signal.SIGSTOP)
    with pytest.raises(WorkerDied, match=r"its fork server ended at its start: it was stopped for 0\.5 s"):
        await start("obey", tmp_path, health_timeout_s=0.5)
    with pytest.raises(WorkerDied, match="worker-7"):
        await asyncio.wait_for(worker.died(), 20)


@pytest.mark.parametrize(("seen", "visible"), [(None, "1,0"), ("", "1,0"), ("5,GPU-7a", "GPU-7a,5")])
def test_gpus_are_counted_among_those_that_the_controller_sees(
    seen: str | None, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert environment(1, Devices(gpus=(1, 0)))["CUDA_VISIBLE_DEVICES"] == visible


class TellsWorker(Worker):
    """Says what it finds, and ends."""

    @classmethod
    def run(cls, job: Job, connection: WorkerConnection) -> None:
        tells.tell()


async def told(logs: Path, devices: Devices | None = None) -> RemoteWorker:
    worker = await LocalSpawner(logs).start("a-worker-of-a-long-name", TellsWorker, Job(threads=2), devices)
    with pytest.raises(WorkerDied, match=rf"\(process {worker.process.pid}\) ended: exit code 7"):
        await worker.died()
    return worker


@both_ways
@pytest.mark.usefixtures("method")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_worker_has_the_environment_the_folder_and_the_devices_of_its_own_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no socket but its own, though others run."""
    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setenv("OLD", "1")
    await told(tmp_path / "first")
    beside = await start("obey", tmp_path / "beside")
    monkeypatch.setenv("NEW", "1")
    monkeypatch.delenv("OLD")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    worker = await told(tmp_path / "second", Devices(cpus=(cpu,), gpus=(3, 1)))
    assert json.loads(words_of(tmp_path / "second", worker.name)) == {
        "pid": worker.process.pid,
        "group": worker.process.pid,
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


async def test_a_module_that_cannot_be_imported_is_in_the_log(tmp_path: Path) -> None:
    kind = type("Kind", (StandIn,), {"__module__": "no_such_module"})
    worker = await LocalSpawner(tmp_path).start("worker-7", kind, Job())
    with pytest.raises(WorkerDied, match=r"(?s)exit code 1; .*No module named 'no_such_module'"):
        await worker.died()


def test_a_fork_of_a_process_that_has_initialised_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    connection = SimpleNamespace()
    with pytest.raises(SystemExit, match="has initialised CUDA, which then works in no worker"):
        work(StandIn, connection, Job())  # type: ignore[arg-type]


def test_libraries_that_would_read_other_variables_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they in a fork of the process that has started the server."""
    monkeypatch.setattr(process_module, "_first_variables", [])
    monkeypatch.setenv("ANY", "1")
    assert process_module._method() == "forkserver"
    monkeypatch.setenv("ANY", "2")
    assert process_module._method() == "forkserver"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert process_module._method() == "spawn"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    assert process_module._method() == "spawn"


@pytest.mark.slow  # two fork servers import torch
async def test_a_fork_server_that_is_killed_takes_its_workers_along_and_is_replaced(tmp_path: Path) -> None:
    workers = [await start("obey", tmp_path / str(number)) for number in range(2)]
    server = parent_of(workers[0].process.pid)
    os.kill(server, signal.SIGKILL)
    for worker in workers:
        assert "ended: signal SIGKILL" in await worker.exit_reason()
        await until_gone(worker.process.pid)
    last = await start("obey", tmp_path)
    assert parent_of(last.process.pid) not in (server, os.getpid())
    await last.close()


async def test_a_worker_whose_start_is_cancelled_ends_and_the_next_one_starts(tmp_path: Path) -> None:
    first = await start("obey", tmp_path / "first")
    server = parent_of(first.process.pid)
    children = Path(f"/proc/{server}/task/{server}/children")
    for num_turns in range(6):
        starting = asyncio.create_task(start("obey", tmp_path, ready=False))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await (await starting).close()
        last = await start("obey", tmp_path)
        while set(children.read_text().split()) != {  # noqa: ASYNC110
            str(first.process.pid),
            str(last.process.pid),
        }:
            await asyncio.sleep(0.01)
        await last.close()
    await first.close()


SCRIPT = """
import asyncio, sys
from pathlib import Path
print("the script runs", flush=True)
from helpers.stand_in import StandIn, StandInJob
from tailrace.drivers.workers.process import LocalSpawner

async def main():
    for number in range(2):
        job = StandInJob(manner="obey")
        worker = await LocalSpawner(Path(sys.argv[1])).start(f"w-{number}", StandIn, job)
        await worker.ready()
        await worker.call(StandIn.obey)
        if number == 0:
            await worker.close()

asyncio.run(main())
assert sys.modules["__main__"].SCRIPT_IS_WHOLE
"""


@pytest.mark.slow  # its script imports torch twice
def test_a_script_without_a_guard_runs_once_and_ends_though_a_worker_lives(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("SCRIPT_IS_WHOLE = True\n" + SCRIPT)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "logs"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "the script runs\n"), done.stderr
    assert "was asked to obey" in words_of(tmp_path / "logs", "w-1")
