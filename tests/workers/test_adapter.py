"""LoRA across processes: the trainer publishes an adapter or merged weights, the engine samples from them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_cases import make_samples, workers

from tailrace.algo.base import AlgorithmSettings
from tailrace.trainer.base import TrainerSettings
from tailrace.types import Sample
from tailrace.workers.local import Workers
from tailrace.workers.trainer import AdapterOff

Execute = Callable[[Any], Any]


async def publish(opened: Workers, version: int) -> int:
    weights = await opened.trainer.publish(version)
    await opened.engines[0].load(weights, kv="recompute")
    return weights.num_bytes


async def roll_out(opened: Workers) -> list[Sample]:
    samples = make_samples(4)
    await asyncio.gather(*(opened.engines[0].generate(sample) for sample in samples))
    return samples


async def generations(model: Path, folder: Path, mode: str) -> tuple[list[Sample], int]:
    """What the engine generates after two steps and a sleep, and the size of a publication."""
    lora = {"rank": 4, "alpha": 8.0, "publish": mode}
    settings = TrainerSettings.model_validate({"learning_rate": 1e-2, "lora": lora})
    algorithm = AlgorithmSettings(kl_coef=0.1)
    async with workers(model, folder, algorithm=algorithm, trainer=settings) as opened:
        assert isinstance(opened.reference, AdapterOff)
        assert not (folder / "logs" / "reference.log").exists()
        samples = await roll_out(opened)
        for version in (1, 2):
            for number, sample in enumerate(samples):
                sample.advantage = number - 1.5
                sample.reference_logprobs = await opened.reference.logprobs(sample)
            await opened.trainer.accumulate([samples], version=0)
            stats = await opened.trainer.step()
            assert (stats.reference_kl < 1e-6) is (version == 1), "it is zero before the first step"
            size = await publish(opened, version)
        await opened.engines[0].sleep()
        await opened.engines[0].wake()
        last = await roll_out(opened)
        for sample in last:
            assert {span.version for span in sample.spans} == {2}
            wanted = await opened.trainer.logprobs(sample)
            assert sample.behavior_logprobs == pytest.approx(wanted, abs=1e-4)
        return last, size


def test_an_adapter_and_merged_weights_make_the_same_engine(
    model_path: Path, tmp_path: Path, execute: Execute
) -> None:
    async def main() -> None:
        merged, whole_size = await generations(model_path, tmp_path / "merged", "merged")
        adapter, adapter_size = await generations(model_path, tmp_path / "adapter", "adapter")
        assert adapter_size < whole_size
        for one, other in zip(merged, adapter, strict=True):
            assert one.completion_ids == other.completion_ids
            assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=1e-5)

    execute(main())
