"""The reference model in a process of its own, beside engines, trainer and scorers."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_cases import make_samples, workers

from tailrace.algo.base import AlgorithmSettings
from tailrace.errors import WorkerDied
from tailrace.rollout.reference import WithReference

Drive = Callable[[Any], Any]
WITH_KL = AlgorithmSettings(kl_coef=0.1)


def test_the_reference_gives_the_log_probs_of_the_first_weights_whatever_is_trained(
    model_path: Path, tmp_path: Path, drive: Drive
) -> None:
    async def main() -> None:
        async with workers(model_path, tmp_path, algorithm=WITH_KL) as opened:
            assert opened.reference is not None
            judge = WithReference(opened.rewards, opened.reference)
            samples = make_samples(6)

            async def roll_out(sample: Any) -> None:
                await opened.engines[0].generate(sample)
                sample.reward = await judge.score(sample)

            await asyncio.gather(*map(roll_out, samples))
            for number, sample in enumerate(samples):
                assert sample.reference_logprobs == pytest.approx(sample.behavior_logprobs, abs=1e-4)
                sample.advantage = number - 2.5
            for _ in range(2):
                await opened.trainer.accumulate([samples])
                stats = await opened.trainer.step()
            assert stats.reference_kl > 1e-4, "the policy has moved away from it"
            again = await opened.reference.logprobs(samples[0])
            assert again == pytest.approx(samples[0].reference_logprobs, abs=1e-5)

    execute(main())


def test_without_a_kl_there_is_no_process_for_it(model_path: Path, tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with workers(model_path, tmp_path) as opened:
            assert opened.reference is None
        assert not (tmp_path / "logs" / "reference.log").exists()

    execute(main())


def test_its_death_ends_the_run_and_who_waits_for_it_learns_why(
    model_path: Path, tmp_path: Path, drive: Drive
) -> None:
    async def main() -> None:
        with pytest.raises(WorkerDied, match=r"reference \(process \d+\) ended: signal SIGKILL"):
            async with workers(model_path, tmp_path, algorithm=WITH_KL) as opened:
                assert opened.reference is not None
                (sample,) = make_samples(1)
                sample.extend([3, 4], [-1.0, -1.0], version=0)
                os.kill(opened.reference.process.pid, signal.SIGKILL)
                await opened.reference.logprobs(sample)

    execute(main())


def test_a_cancelled_request_leaves_the_others_their_answers(
    model_path: Path, tmp_path: Path, drive: Drive
) -> None:
    async def main() -> None:
        async with workers(model_path, tmp_path, algorithm=WITH_KL) as opened:
            assert opened.reference is not None
            samples = make_samples(3)
            for sample in samples:
                sample.extend([3, 4, 5][: sample.id.number + 1], [-1.0] * (sample.id.number + 1), version=0)
            tasks = [asyncio.create_task(opened.reference.logprobs(sample)) for sample in samples]
            await asyncio.sleep(0)
            tasks[1].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(found[1], asyncio.CancelledError)
            assert [len(each) for each in (found[0], found[2])] == [1, 3]  # type: ignore[arg-type]

    execute(main())
