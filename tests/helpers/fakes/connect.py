"""Engines connected to fake servers, and the comparison of their records."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from helpers.fakes.generations import GENERATIONS
from helpers.fakes.model import Request, text_of
from helpers.fakes.server import FakeServer
from helpers.fakes.sglang import FakeSglang
from helpers.fakes.vllm import FakeVllm
from helpers.tiny_models import VOCABULARY
from tailrace.contracts.engine import TokenCounter
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import LoraSettings
from tailrace.contracts.weights import Link, Weights
from tailrace.drivers.engine.supervised import SupervisedEngine
from tailrace.drivers.trainer.adapter import adapter_tensors
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.drivers.weights.transfers import Transfers
from tailrace.extras.http import sglang, vllm
from tailrace.extras.http.engine import HttpEngine
from tailrace.extras.http.self_test import Expected, check_server
from tailrace.extras.http.server import JoinedServer
from tailrace.extras.http.settings import SglangEngineSettings, VllmEngineSettings
from tailrace.types import Group, Prompt, Sample, SampleId

NUM_TOKENS = 128


def fake_server(generation: str, model: Path, **options: Any) -> FakeServer:
    """A fake that is not started yet."""
    kind = FakeVllm if GENERATIONS[generation].server == "vllm" else FakeSglang
    return kind(generation, model, **options)


def http_engine(
    fake: FakeServer,
    sampling: SamplingSettings | None = None,
    *,
    name: str = "engine-0",
    timeout_s: float = 20.0,
    lora: LoraSettings | None = None,
) -> HttpEngine:
    """An engine that joins a fake. Which kind of server it is, is all that it is told, and whether it gets
    adapters."""
    sampling = sampling or SamplingSettings(max_completion_tokens=NUM_TOKENS)
    is_vllm = fake.generation.server == "vllm"
    detect = partial(vllm.detect, num_adapters=lora.versions if lora else 0) if is_vllm else sglang.detect
    kind = VllmEngineSettings if is_vllm else SglangEngineSettings
    expected = Expected(kind(urls=(fake.url,)), sampling, VOCABULARY, NUM_TOKENS)
    return HttpEngine(
        name,
        JoinedServer(fake.url),
        lambda client: detect(client, sampling, ()),
        health_timeout_s=timeout_s,
        check=lambda engine: check_server(engine.connection, expected),
        transfers=Transfers(_is_in_files),
        expected=adapter_tensors(fake.folder, lora) if lora else expected_tensors(fake.folder, "float32"),
        decode=text_of,
    )


async def _is_in_files(weights: Weights, link: Link) -> None:
    assert not weights.is_streamed


@asynccontextmanager
async def connected(*fakes: FakeServer, **options: Any) -> AsyncIterator[list[SupervisedEngine]]:
    """An open engine for each fake, restarted when it dies."""
    async with AsyncExitStack() as stack:
        engines = []
        for number, fake in enumerate(fakes):
            engines.append(engine := supervised(fake, f"engine-{number}", **options))
            stack.push_async_callback(engine.close)
            await engine.open()
            keeping = asyncio.ensure_future(engine.keep(restart_timeout_s=30))
            stack.callback(keeping.cancel)
        yield engines


def supervised(fake: FakeServer, name: str, **options: Any) -> SupervisedEngine:
    """An engine over lives that join a fake."""

    async def begin() -> HttpEngine:
        return http_engine(fake, name=name, **options)

    return SupervisedEngine(name, fake.model.slots, begin, TokenCounter())


def distinct_samples(num: int) -> list[Sample]:
    """Unstarted samples, no two of one prompt. A record is matched with its sample by the prompt."""
    samples = []
    for index in range(num):
        group = Group(Prompt(index, [1 + index % 60, 1 + index // 60, 3, 4, 5, 6, 7, 8, 9]), 1, [])
        group.samples = [Sample(SampleId(index, 0, 0), group, seed=index)]
        samples += group.samples
    return samples


@dataclass
class Truth:
    """What the servers' records say of the samples of a run.

    Args:
        num_requests: requests of these samples.
        num_lost: tokens that were generated and did not arrive.
    """

    num_requests: int = 0
    num_lost: int = 0


def compare_with_records(samples: Sequence[Sample], fakes: Sequence[FakeServer]) -> Truth:
    """Assert that each sample is the chain of the servers' own records: every token with its log-prob, its
    weights and nothing twice. Each request must have begun where the sample was."""
    truth = Truth()
    for sample in samples:
        prompt = list(sample.prompt.ids)
        requests = [
            each for fake in fakes for each in fake.model.requests if each.ids[: len(prompt)] == prompt
        ]
        requests.sort(key=lambda request: request.order)
        starts = [len(request.ids) - len(prompt) for request in requests]
        versions = [span.version for span in sample.spans for _ in range(span.num_tokens)]
        for request, start, end in zip(requests, starts, [*starts[1:], sample.num_tokens], strict=True):
            assert request.ids[len(prompt) :] == sample.completion_ids[:start]
            assert request.tokens[: end - start] == sample.completion_ids[start:end]
            assert request.logprobs[: end - start] == sample.behavior_logprobs[start:end]
            assert request.weights[: end - start] == versions[start:end]
            truth.num_lost += len(request.tokens) - (end - start)
        truth.num_requests += len(requests)
    return truth


def salts_of(requests: Sequence[Request]) -> list[str]:
    """The salt of each request, without what tells one client from another."""
    return [request.salt.rpartition("-")[2] for request in requests]
