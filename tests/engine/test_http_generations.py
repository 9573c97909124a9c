"""One client against every generation of vLLM and SGLang (tests/helpers/fakes)."""

import asyncio
import random
from collections.abc import Callable, Coroutine
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


async def arrived(samples: list[Sample], num_tokens: int = 3) -> None:
    """Wait until every sample has some tokens."""
    while any(sample.num_tokens < num_tokens for sample in samples):
        await asyncio.sleep(0.001)


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
