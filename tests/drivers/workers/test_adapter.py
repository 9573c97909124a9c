"""LoRA across processes: the trainer publishes an adapter, the engine adds it to its weights."""

import asyncio
from pathlib import Path

import pytest

from helpers.worker_cases import make_samples, workers
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.engine import GenerationOutput, GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.assembly.open import Workers
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.workers.trainer import AdapterOff
from tailrace.types import Sample


async def roll_out(opened: Workers) -> list[Sample]:
    samples = make_samples(4)
    await asyncio.gather(*(opened.engines[0].generate(sample) for sample in samples))
    return samples


async def train_and_publish(opened: Workers, samples: list[Sample], version: int) -> float:
    """The KL to the reference in the step."""
    assert opened.reference is not None
    for number, sample in enumerate(samples):
        sample.advantage = number - 1.5
        sample.reference_logprobs = await opened.reference.logprobs(sample)
    await opened.trainer.accumulate([samples], version=0)
    stats = await opened.trainer.step()
    weights = await opened.trainer.publish(version)
    assert all("lora_" in tensor.name for tensor in weights.tensors)
    await opened.engines[0].load(weights, kv="recompute")
    return stats.reference_kl


def generated_by(model: Path, samples: list[Sample]) -> dict[str, GenerationOutput]:
    """What an engine in this process generates with the weights of a folder, from the same seeds."""
    engine = NativeEngine(model, NativeEngineSettings(), SamplingSettings(max_completion_tokens=40))
    for sample in samples:
        engine.submit(GenerationRequest(str(sample.id), sample.prompt.ids, [], sample.seed))
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    return {output.id: output for output in outputs}


async def test_an_engine_with_the_adapter_generates_as_one_with_merged_weights(
    model_path: Path, tmp_path: Path
) -> None:
    lora = {"rank": 4, "alpha": 8.0, "publish": "adapter"}
    settings = TrainerSettings.model_validate({"learning_rate": 1e-2, "lora": lora})
    algorithm = AlgorithmSettings(kl_coef=0.1)
    async with workers(model_path, tmp_path, algorithm=algorithm, trainer=settings) as opened:
        assert isinstance(opened.reference, AdapterOff)
        assert not (tmp_path / "logs" / "reference.log").exists()
        samples = await roll_out(opened)
        assert await train_and_publish(opened, samples, 1) == pytest.approx(0.0, abs=1e-7)
        assert await train_and_publish(opened, samples, 2) > 1e-5
        await opened.engines[0].sleep()
        await opened.engines[0].wake()
        last = await roll_out(opened)
        await (await opened.trainer.save(tmp_path / "merged"))
    merged = generated_by(tmp_path / "merged", last)
    for sample in last:
        assert {span.version for span in sample.spans} == {2}
        output = merged[str(sample.id)]
        assert sample.completion_ids == output.ids
        assert sample.behavior_logprobs == pytest.approx(output.behavior_logprobs, abs=1e-5)
    assert [s.behavior_logprobs for s in last] != [s.behavior_logprobs for s in samples]
