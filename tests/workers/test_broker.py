"""Workers that join through a real Redis server."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stand_in import Obey, StandInJob
from worker_cases import TRAINER, make_samples, workers

from tailrace.algo.base import AlgorithmSettings
from tailrace.errors import ConfigError, WorkerDied
from tailrace.trainer.base import StepStats
from tailrace.trainer.batch import TrainingSample
from tailrace.trainer.trainer import TorchTrainer
from tailrace.workers import broker
from tailrace.workers.base import BrokerSettings
from tailrace.workers.broker import BrokerChannel, BrokeredWorker, Invitation, connect
from tailrace.workers.messages import Done, Ready

Execute = Callable[[Any], Any]
DECODER = msgspec.msgpack.Decoder(Ready | Done)
JOB = StandInJob.model_validate({"manner": "obey"})


@contextmanager
def joined(url: str, run: str) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer that joins, as on another host."""
    words = ["-m", "tailrace.cli", "join", "trainer", "--broker", url, "--run", run]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_trainer_that_joins_through_the_broker_trains_as_one_of_this_process(
    redis_url: str, model_path: Path, tmp_path: Path, execute: Execute
) -> None:
    samples, after = make_samples(8), make_samples(4)

    async def trained() -> StepStats:
        """Four groups are generated and trained; with the published weights one group more is generated."""
        broker = BrokerSettings(url=redis_url, max_records=2)
        async with workers(model_path, tmp_path / "there", broker=broker) as opened:
            engine = opened.engines[0]
            await asyncio.gather(*(engine.generate(sample) for sample in samples))
            for sample in samples:
                sample.reward, sample.advantage = 1.0, float(sample.completion_ids.count(9)) - 1.0
            await asyncio.gather(
                *(opened.trainer.accumulate([samples[i : i + 2]], version=0) for i in (0, 2, 4, 6))
            )
            stats: StepStats = await opened.trainer.step()
            await engine.load(await opened.trainer.publish(1), kv="recompute")
            await asyncio.gather(*(engine.generate(sample) for sample in after))
            return stats

    with joined(redis_url, "there"):
        there = execute(trained())
    here = TorchTrainer(model_path, TRAINER, AlgorithmSettings(), temperature=1.0, max_completion_tokens=40)
    here.accumulate([[TrainingSample.of(sample) for sample in samples]])
    stats = here.step()
    assert (there.loss, there.grad_norm) == pytest.approx((stats.loss, stats.grad_norm), rel=1e-5)
    assert {span.version for sample in after for span in sample.spans} == {1}
    for sample in after:
        assert sample.behavior_logprobs == pytest.approx(here.logprobs(TrainingSample.of(sample)), abs=1e-4)


def test_a_joined_trainer_that_is_killed_ends_the_run_by_name(
    redis_url: str, model_path: Path, tmp_path: Path, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(process: subprocess.Popen[bytes]) -> None:
        async with workers(model_path, tmp_path / "killed", broker=BrokerSettings(url=redis_url)) as opened:
            await opened.trainer.publish(1)
            os.kill(process.pid, signal.SIGKILL)
            connect(redis_url, is_async=False).delete("tailrace:killed:trainer:1:worker")  # it expires
            await opened.trainer.step()

    monkeypatch.setattr(broker, "SIGN_EVERY_S", 0.1)
    said = "trainer gave no sign of life through the broker"
    with joined(redis_url, "killed") as process, pytest.raises(WorkerDied, match=said):
        execute(main(process))


def stand_in(redis_url: str, run: str, answers: Callable[[BrokerChannel[Obey]], None]) -> threading.Thread:
    """A worker in a thread that takes its invitation."""

    def work() -> None:
        redis = connect(redis_url, is_async=False)
        _, record = redis.blpop(f"tailrace:{run}:worker-7:invitations")
        invitation = msgspec.msgpack.decode(record, type=Invitation)
        assert StandInJob.model_validate_json(invitation.job) == JOB
        prefix, decoder = f"tailrace:{run}:worker-7:{invitation.life}", msgspec.msgpack.Decoder(Obey)
        channel = BrokerChannel(redis, prefix, decoder, invitation.max_records)
        answers(channel)
        channel.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


async def invited(url: str, run: str, max_records: int) -> BrokeredWorker:
    settings = BrokerSettings(url=url, max_records=max_records)
    return await BrokeredWorker.invite("worker-7", JOB, DECODER, settings, run)


def test_a_stream_never_holds_more_than_its_bound_and_every_message_arrives_once_in_order(
    redis_url: str, execute: Execute
) -> None:
    lengths: list[int] = []

    def answers(channel: BrokerChannel[Obey]) -> None:
        redis = connect(redis_url, is_async=False)
        prefix = "tailrace:bounded:worker-7:1"
        for number, _ in zip(range(40), channel, strict=False):
            lengths.extend(redis.xlen(f"{prefix}:{end}") for end in ("to", "from"))
            channel.send(Ready() if number % 2 else Done())

    async def main() -> list[str]:
        worker = await invited(redis_url, "bounded", max_records=3)
        thread = stand_in(redis_url, "bounded", answers)
        heard = [worker.next_answer() for _ in range(40)]
        for _ in range(40):
            worker.send(Obey())
        answered = [type(answer).__name__ for answer in await asyncio.gather(*heard)]
        await worker.close()
        await asyncio.to_thread(thread.join)
        return answered

    assert execute(main()) == ["Done", "Ready"] * 20
    assert max(lengths) <= 3


def test_a_record_that_is_no_message_ends_the_worker(redis_url: str, execute: Execute) -> None:
    async def main() -> None:
        worker = await invited(redis_url, "garbage", max_records=3)
        connect(redis_url, is_async=False).xadd(
            "tailrace:garbage:worker-7:1:from", {"message": b"\x80\x04pickle"}
        )
        with pytest.raises(WorkerDied, match="the broker failed: ValidationError"):
            await worker.answered(worker.next_answer(), Ready, "start")
        await worker.close()

    execute(main())


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "http://127.0.0.1"])
def test_a_server_that_cannot_be_reached_is_refused_at_the_start(url: str, execute: Execute) -> None:
    with pytest.raises(ConfigError, match=r"broker\.url"):
        execute(invited(url, "nowhere", max_records=3))
