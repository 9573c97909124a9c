"""Workers of other hosts that dial in: here `tailrace join` in threads of this process, once as a process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import DEADLINE_S, worker_of
from helpers.stand_in import StandInJob
from helpers.worker_cases import TRAINER, make_samples, workers
from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.cli import main
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import StepStats
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.drivers.weights.settings import ProcessGroupSettings
from tailrace.drivers.workers.base import LocalHostSettings, Role
from tailrace.drivers.workers.engine import EngineWorker
from tailrace.drivers.workers.process import LocalProcess, LocalSpawner, start_process
from tailrace.drivers.workers.reward_process import RewardWorker
from tailrace.drivers.workers.wire import Hello
from tailrace.drivers.workers.worker import WorkerConnection
from tailrace.errors import ConfigError, WorkerDied
from tailrace.extras.cluster import join as join_module
from tailrace.extras.cluster.join import TOKEN_VARIABLE, open_joining

TOKEN = "a token of this test"
STREAM = ProcessGroupSettings(host="127.0.0.1")


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def host(port: int, *roles: Role) -> LocalHostSettings:
    return LocalHostSettings(join=roles, listen=f"127.0.0.1:{port}")


@contextmanager
def joined(role: Role, port: int) -> Iterator[Future[int]]:
    """A worker that joins as soon as the run listens. It is forked where torch is imported already, and not
    started anew as on a host of its own. Yields the exit code."""

    def join() -> int:
        until_it_listens(port)
        return main(["join", role, f"127.0.0.1:{port}"])

    async def forked(*arguments: Any, **options: Any) -> LocalProcess:
        return await start_process(*arguments, **options | {"method": "forkserver"})

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setattr(join_module, "start_process", forked)
        yield thread.submit(join)


def until_it_listens(port: int) -> None:
    """A run that fails first never listens."""
    ends_s = time.monotonic() + DEADLINE_S
    with socket.socket() as client:
        while client.connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < ends_s, "no run listens"
            time.sleep(0.01)


def test_a_trainer_an_engine_and_a_reward_worker_that_join_train_as_those_of_this_host(
    port: int, model_path: Path, tmp_path: Path
) -> None:
    samples, after = make_samples(8), make_samples(4)

    async def trained() -> StepStats:
        """Four groups are generated and trained; with the published weights one group more is generated."""
        settings = host(port, "trainer", "engine", "reward")
        async with workers(model_path, tmp_path, host=settings, weights=STREAM) as opened:
            assert opened.trainer.workers[0].address == "127.0.0.1"
            engine = opened.engines[0]
            await asyncio.gather(*(engine.generate(sample) for sample in samples))
            for sample in samples:
                assert opened.rewards is not None
                sample.reward = await opened.rewards.score(sample)
                sample.advantage = float(sample.completion_ids.count(9)) - 1.0
            await asyncio.gather(
                *(opened.trainer.accumulate([samples[i : i + 2]], version=0) for i in (0, 2, 4, 6))
            )
            stats = await opened.trainer.step()
            await engine.load(await opened.trainer.publish(1), kv="recompute")
            await asyncio.gather(*(engine.generate(sample) for sample in after))
            return stats

    with joined("trainer", port) as one, joined("engine", port) as two, joined("reward", port) as three:
        there = asyncio.run(asyncio.wait_for(trained(), DEADLINE_S))
        assert [each.result(timeout=30) for each in (one, two, three)] == [0, 0, 0]
    here = TorchTrainer(model_path, TRAINER, AlgorithmSettings(), SamplingSettings(max_completion_tokens=40))
    here.accumulate([[TrainingSample.of(sample) for sample in samples]])
    stats = here.step()
    assert (there.loss, there.grad_norm) == pytest.approx((stats.loss, stats.grad_norm), rel=1e-5)
    assert [sample.reward for sample in samples] == [len(s.text) + len("what?") / 8 for s in samples]
    assert {span.version for sample in after for span in sample.spans} == {1}
    for sample in after:
        assert sample.behavior_logprobs == pytest.approx(here.logprobs(TrainingSample.of(sample)), abs=1e-4)


@pytest.mark.slow
def test_a_joined_trainer_works_on_after_sigterm_and_ends_the_run_by_name_when_it_is_killed(
    port: int, model_path: Path, tmp_path: Path
) -> None:
    """A cluster that takes its nodes back sends SIGTERM to all of them, while the run still saves."""
    published = []

    def join() -> "subprocess.Popen[bytes]":
        until_it_listens(port)
        words = ["join", "trainer", f"127.0.0.1:{port}"]
        return subprocess.Popen([sys.executable, "-m", "tailrace.cli", *words])

    async def run(joining: "Future[subprocess.Popen[bytes]]") -> None:
        settings = host(port, "trainer")
        async with workers(model_path, tmp_path, host=settings, weights=STREAM) as opened:
            published.append(await opened.trainer.publish(1))
            joining.result().terminate()
            await asyncio.sleep(1.0)
            published.append(await opened.trainer.publish(2))
            joining.result().kill()  # the kernel ends the worker with it
            await asyncio.get_running_loop().create_future()

    said = r"trainer \(joined from 127\.0\.0\.1\) has ended; its host has its log"
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(join)
        with pytest.raises(WorkerDied, match=said):
            asyncio.run(asyncio.wait_for(run(joining), DEADLINE_S))
        joining.result().wait()
    assert len(published) == 2


def test_an_engine_that_dies_is_replaced_by_the_next_one_that_joins(
    port: int, model_path: Path, tmp_path: Path
) -> None:
    async def run(first: Future[int]) -> None:
        async with workers(model_path, tmp_path, host=host(port, "engine"), weights=STREAM) as opened:
            (engine,) = opened.engines
            weights = await opened.trainer.publish(1)
            await engine.load(weights, kv="recompute")
            os.kill(worker_of(os.getpid(), "engine"), signal.SIGKILL)
            while engine.state != "dead":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await asyncio.wrap_future(first) == 1
            joins.enter_context(joined("engine", port))
            while engine.state != "open":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (sample,) = make_samples(1)
            await engine.generate(sample)
            assert {span.version for span in sample.spans} == {1}

    with ExitStack() as joins:
        first = joins.enter_context(joined("engine", port))
        asyncio.run(asyncio.wait_for(run(first), DEADLINE_S))


async def dialled(port: int, role: str, token: str = TOKEN) -> WorkerConnection:
    return await asyncio.to_thread(WorkerConnection.dial, ("127.0.0.1", port), Hello(token, role))


async def test_jobs_go_to_those_that_join_in_order_and_one_too_many_waits(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_joining(host(port, "engine", "reward"), LocalSpawner(tmp_path)) as spawner:
        early = await dialled(port, "engine")
        job = StandInJob(manner="obey")
        first = await spawner.start("engine-0", EngineWorker, job)
        second = await spawner.start("engine-1", EngineWorker, job)
        reward = await spawner.start("scorer-0", RewardWorker, job)
        await first.connected()
        assert early.receive_job(StandInJob) == job
        waiting = asyncio.create_task(second.ready())
        await asyncio.sleep(0)
        assert clock.who_waits() == f"engine-1 to join: tailrace join engine 127.0.0.1:{port}"
        late = [await dialled(port, "engine") for _ in range(2)]
        await second.connected()
        late[0].answer(0, None)
        await waiting
        early.socket.close()
        with pytest.raises(WorkerDied, match="engine-0"):
            await first.died()
        third = await spawner.start("engine-0", EngineWorker, job)
        await third.connected()
        assert late[1].receive_job(StandInJob) == job
        assert not reward.has_ended
        for connection in late:
            connection.socket.close()
        for worker in (first, second, third, reward):
            await worker.close()
    assert TOKEN not in capsys.readouterr().err


@pytest.mark.parametrize(("role", "token"), [("engine", "another"), ("reward", TOKEN), ("", TOKEN)])
async def test_a_wrong_token_or_a_role_that_is_not_expected_is_sent_away(
    port: int, tmp_path: Path, role: str, token: str
) -> None:
    async with open_joining(host(port, "engine"), LocalSpawner(tmp_path)):
        connection = await dialled(port, role, token)
        assert await asyncio.to_thread(connection.receive_job, StandInJob) is None
        connection.socket.close()


async def test_a_hundred_that_join_at_once_all_get_jobs_though_some_are_taken_for_strangers(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.drivers.workers.strangers.MAX_STRANGERS", 2)
    job = StandInJob(manner="obey")
    answered = threading.Event()

    def work() -> None:
        connection, found = WorkerConnection.employed(("127.0.0.1", port), Hello(TOKEN, "engine"), StandInJob)
        assert found == job
        answered.wait()
        connection.socket.close()

    async with open_joining(host(port, "engine"), LocalSpawner(tmp_path)) as spawner:
        workers = [await spawner.start(f"engine-{each}", EngineWorker, job) for each in range(100)]
        with ThreadPoolExecutor(100) as threads:
            joining = [threads.submit(work) for _ in workers]
            try:
                await asyncio.gather(*(worker.connected() for worker in workers))
            finally:
                answered.set()
        assert [each.result() for each in joining] == [None] * 100
        await asyncio.gather(*(worker.close() for worker in workers))


async def test_without_a_token_in_the_environment_a_new_one_is_printed(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    async with open_joining(host(port, "engine"), LocalSpawner(tmp_path)) as spawner:
        token = capsys.readouterr().err.split()[-1]
        assert len(token) > 40
        connection = await dialled(port, "engine", token)
        worker = await spawner.start("engine-0", EngineWorker, StandInJob(manner="obey"))
        await worker.connected()
        connection.socket.close()
        await worker.close()


async def test_an_address_of_another_host_is_refused(tmp_path: Path) -> None:
    settings = LocalHostSettings(join=("engine",), listen="192.0.2.1:7777")
    with pytest.raises(ConfigError, match=r"host\.listen = '192\.0\.2\.1:7777': this host cannot listen"):
        async with open_joining(settings, LocalSpawner(tmp_path)):
            pass


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:x"])
def test_a_run_that_does_not_listen_is_named(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "engine", address]) == 2
    said = f"tailrace: HOST:PORT = '{address}': no run listens there"
    assert capsys.readouterr().err.startswith(said)
