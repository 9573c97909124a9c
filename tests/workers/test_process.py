"""How a worker process is started, watched and ended."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stand_in import Obey, StandInJob
from worker_cases import is_running, until_gone, words_of

from tailrace import clock
from tailrace.devices import Devices
from tailrace.errors import WorkerDied
from tailrace.workers import process as process_module
from tailrace.workers.messages import Done, Ready
from tailrace.workers.orphans import parent_of
from tailrace.workers.process import Begin, WorkerProcess, _environment, executed, forked

Execute = Callable[[Any], Any]
DECODER = msgspec.msgpack.Decoder(Ready | Done)
both_ways = pytest.mark.parametrize("begin", [executed, forked])


async def spawn(
    manner: str,
    logs: Path,
    devices: Devices | None = None,
    ready: bool = True,
    begin: Begin = forked,
    health_timeout_s: float | None = None,
) -> WorkerProcess:
    job = StandInJob.model_validate({"manner": manner, "threads": 3, "health_timeout_s": health_timeout_s})
    worker = await WorkerProcess.spawn(
        "worker-7", "stand_in", job, DECODER, logs=logs, devices=devices, begin=begin
    )
    if ready:
        await worker.answered(worker.next_answer(), Ready, "start")
    return worker


def test_answers_come_in_the_order_of_the_questions(tmp_path: Path, execute: Execute) -> None:
    async def main() -> None:
        worker = await spawn("obey", tmp_path)
        assert await asyncio.gather(*(worker.ask(Obey(), Done) for _ in range(100))) == [Done()] * 100
        await worker.close()
        assert words_of(tmp_path, "worker-7").count("was asked to obey") == 100

    execute(main())


def test_an_answer_nobody_waits_for_any_more_is_not_the_next_ones(tmp_path: Path, execute: Execute) -> None:
    async def main() -> None:
        worker = await spawn("obey", tmp_path)
        forgotten = asyncio.create_task(worker.ask(Obey(), Done))
        await asyncio.sleep(0)
        forgotten.cancel()
        assert await worker.ask(Obey(), Done) == Done()
        assert await worker.ask(Obey(), Done) == Done()
        await worker.close()

    execute(main())


@both_ways
def test_an_exception_in_a_worker_is_raised_with_its_name_its_cause_and_its_traceback(
    tmp_path: Path, execute: Execute, begin: Begin
) -> None:
    async def main() -> None:
        worker = await spawn("raise", tmp_path, begin=begin)
        with pytest.raises(WorkerDied) as died:
            await worker.ask(Obey(), Done)
        words = str(died.value)
        assert words.startswith(f"worker-7 (process {worker.pid}) ended: exit code 1; the end of {tmp_path}")
        assert "Traceback (most recent call last)" in words
        assert words.endswith("ValueError: the model melted")
        with pytest.raises(WorkerDied, match="the model melted"):
            await worker.ask(Obey(), Done)
        await worker.close()

    execute(main())


def test_last_words_are_of_this_process_not_of_a_run_before(tmp_path: Path, execute: Execute) -> None:
    async def main() -> None:
        (tmp_path / "worker-7.log").write_text("words of yesterday\n")
        worker = await spawn("obey", tmp_path)
        worker.kill()
        with pytest.raises(WorkerDied, match="ended: signal SIGKILL; it printed nothing"):
            await worker.ask(Obey(), Done)
        assert words_of(tmp_path, "worker-7") == "words of yesterday\n"

    execute(main())


@both_ways
def test_a_killed_worker_fails_every_open_call(tmp_path: Path, execute: Execute, begin: Begin) -> None:
    async def main() -> None:
        worker = await spawn("work for ever", tmp_path, begin=begin)
        calls = [asyncio.create_task(worker.ask(Obey(), Done)) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert clock.who_waits() == "worker-7: Obey"
        os.kill(worker.pid, signal.SIGKILL)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [WorkerDied] * 3
        assert all("signal SIGKILL" in str(error) for error in errors)
        with pytest.raises(WorkerDied, match="worker-7"):
            await worker.died()

    execute(main())


def test_words_that_cannot_be_read_end_the_worker_with_the_reason(tmp_path: Path, execute: Execute) -> None:
    async def main() -> None:
        worker = await spawn("babble", tmp_path)
        with pytest.raises(WorkerDied, match="could not handle its message: DecodeError") as died:
            await worker.ask(Obey(), Done)
        assert isinstance(died.value.__cause__, msgspec.DecodeError)

    execute(main())


@both_ways
def test_a_worker_that_does_not_end_is_killed(
    tmp_path: Path, execute: Execute, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "CLOSE_S", 0.1)

    async def main() -> None:
        worker = await spawn("stay", tmp_path, begin=begin)
        await worker.close()
        await until_gone(worker.pid)

    execute(main())


def test_a_worker_ignores_ctrl_c(tmp_path: Path, execute: Execute) -> None:
    async def main() -> None:
        worker = await spawn("obey", tmp_path)
        os.kill(worker.pid, signal.SIGINT)
        assert await worker.ask(Obey(), Done) == Done()
        await worker.close()

    execute(main())


@both_ways
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")
def test_a_pinned_worker_stays_on_its_cpu(tmp_path: Path, execute: Execute, begin: Begin) -> None:
    async def main() -> None:
        cpu = min(os.sched_getaffinity(0))
        worker = await spawn("obey", tmp_path, Devices(cpus=(cpu,)), begin=begin)
        assert os.sched_getaffinity(worker.pid) == {cpu}
        await worker.close()

    execute(main())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_thread_counts_stand_before_anything_is_loaded(tmp_path: Path, execute: Execute) -> None:
    async def main() -> None:
        worker = await spawn("obey", tmp_path, begin=executed)
        found = set(Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0"))
        assert {b"OMP_NUM_THREADS=3", b"MKL_NUM_THREADS=3", b"OPENBLAS_NUM_THREADS=3"} <= found
        await worker.close()

    execute(main())


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from test_process import spawn
from stand_in import Obey
from tailrace.workers import process

async def main():
    begin = getattr(process, sys.argv[2])
    workers = [await spawn(manner, Path(sys.argv[1]) / manner, begin=begin)
               for manner in ("obey", "work for ever")]
    for worker in workers:
        worker.next_answer()
        worker.send(Obey())
    workers.append(await spawn("start for ever", Path(sys.argv[1]) / "starting", ready=False, begin=begin))
    await asyncio.sleep(0.1)
    print(*(worker.pid for worker in workers), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@both_ways
@pytest.mark.parametrize("stopped", [False, True])
def test_workers_end_when_their_controller_is_killed(
    tmp_path: Path, execute: Execute, stopped: bool, begin: Begin
) -> None:
    """While they wait, work, are still starting, and while they are stopped."""

    async def main() -> None:
        controller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CONTROLLER, tmp_path, begin.__name__),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parent,
        )
        assert controller.stdout is not None
        pids = [int(pid) for pid in (await controller.stdout.readline()).split()]
        assert len(pids) == 3 and all(is_running(pid) for pid in pids)
        for pid in pids if stopped else []:
            os.kill(pid, signal.SIGSTOP)
        controller.kill()
        await until_gone(*pids)
        await controller.communicate()

    execute(main())


@both_ways
def test_a_stopped_worker_is_closed_as_any_other(tmp_path: Path, execute: Execute, begin: Begin) -> None:
    async def main() -> None:
        worker = await spawn("obey", tmp_path, begin=begin)
        os.kill(worker.pid, signal.SIGSTOP)
        await worker.close()
        with pytest.raises(WorkerDied, match="ended: exit code 0"):
            await worker.died()

    execute(main())


@both_ways
def test_a_worker_that_is_stopped_too_long_is_ended_and_one_that_computes_is_not(
    tmp_path: Path, execute: Execute, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "LOOK_S", 0.1)

    async def main() -> None:
        worker = await spawn("work for ever", tmp_path, begin=begin, health_timeout_s=0.5)
        worker.send(Obey())
        await asyncio.sleep(2)
        assert not worker.has_ended
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(
            WorkerDied, match=r"^worker-7 was stopped for 0\.5 s \(host\.health_timeout_s\); .* SIGKILL"
        ):
            await worker.died()

    execute(main())


def test_a_worker_is_closed_also_if_the_process_that_forked_it_is_stopped(
    tmp_path: Path, execute: Execute
) -> None:
    async def main() -> None:
        worker = await spawn("obey", tmp_path)
        server = parent_of(worker.pid)
        os.kill(server, signal.SIGSTOP)
        try:
            await asyncio.wait_for(worker.close(), 20)
        finally:
            os.kill(server, signal.SIGCONT)
        with pytest.raises(WorkerDied, match="ended: exit code 0"):
            await worker.died()

    execute(main())


@pytest.mark.parametrize(("seen", "visible"), [(None, "1,0"), ("", "1,0"), ("5,GPU-7a", "GPU-7a,5")])
def test_gpus_are_counted_among_those_that_the_controller_sees(
    seen: str | None, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert _environment(1, Devices(gpus=(1, 0)))["CUDA_VISIBLE_DEVICES"] == visible
