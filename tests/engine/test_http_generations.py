"""One client against every generation of vLLM and SGLang (tests/helpers/fakes)."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes.connect import (
    NUM_TOKENS,
    compare_with_records,
    connected,
    distinct_samples,
    fake_server,
    salts_of,
)
from helpers.fakes.generations import GENERATIONS
from helpers.tiny_models import save_tiny_model

from tailrace.record.events import Recorder
from tailrace.rollout.router import Router
from tailrace.types import KV, Sample
from tailrace.weights.base import Weights
from tailrace.weights.filesystem import FilesystemSender

every_generation = pytest.mark.parametrize("generation", GENERATIONS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def publish(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Weights]:
    from safetensors.torch import load_file

    sender = FilesystemSender(tmp_path_factory.mktemp("weights") / "weights", model, 10**9)
    tensors = load_file(model / "model.safetensors")
    return lambda version: sender.publish(tensors, version)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def arrived(samples: list[Sample], num: int = 3) -> None:
    """Wait until every sample has some tokens."""
    while any(sample.num_tokens < num for sample in samples):
        await asyncio.sleep(0.001)


def num_tokens(samples: list[Sample]) -> int:
    return sum(sample.num_tokens for sample in samples)


@every_generation
def test_a_completion_is_what_the_server_generated(generation: str, model: Path) -> None:
    async def main() -> None:
        with fake_server(generation, model) as fake:
            async with connected(fake) as (engine,):
                samples = distinct_samples(8)
                await asyncio.gather(*(engine.generate(sample) for sample in samples))
            assert [sample.num_tokens for sample in samples] == [NUM_TOKENS] * 8
            assert {sample.finish_reason for sample in samples} == {"length"}
            assert compare_with_records(samples, [fake]).num_requests == 8
            assert fake.ignored == set()

    run(main())


@every_generation
def test_tokens_and_versions_equal_the_servers_records_through_aborts_and_updates(
    generation: str, model: Path, publish: Callable[[int], Weights]
) -> None:
    """Over 10,000 tokens, on two replicas."""

    async def main() -> None:
        options = {"slots": 8, "step_s": 0.002}
        with fake_server(generation, model, **options) as one, fake_server(generation, model, **options) as two:
            async with connected(one, two) as engines:
                router, chance = Router(engines, Recorder()), random.Random(0)
                samples = distinct_samples(80)

                async def serve(sample: Sample) -> None:
                    while sample.finish_reason is None:
                        task = asyncio.ensure_future(router.serve(sample))
                        target = sample.num_tokens + chance.randint(1, NUM_TOKENS)
                        while not task.done() and sample.num_tokens < target:
                            await asyncio.sleep(0.01)
                        task.cancel()
                        with suppress(asyncio.CancelledError):
                            await task

                async def update() -> None:
                    kvs: list[KV] = ["keep", "recompute", "recompute", "keep"]
                    for version, kv in enumerate(kvs, start=1):
                        while num_tokens(samples) < version * 2000:
                            await asyncio.sleep(0.01)
                        weights = publish(version)
                        await asyncio.gather(*(engine.load(weights, kv=kv) for engine in engines))

                await asyncio.gather(update(), *map(serve, samples))
                assert sum(engine.usage().num_generated for engine in engines) == 80 * NUM_TOKENS
            truth = compare_with_records(samples, [one, two])
            assert {span.version for sample in samples for span in sample.spans} == {0, 1, 2, 3, 4}
            assert truth.num_requests > 80
            for fake in (one, two):
                assert fake.model.violations == []
                assert fake.ignored == set()
                assert fake.model.version == 4

    run(main())
