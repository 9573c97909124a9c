"""The served engine keeps the contract of engines, for the client of vLLM and without a special case."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serve_cases import CONTEXT, MODEL_NAME

from helpers.engine_contract import EngineContract, Main
from helpers.processes import worker_of
from helpers.served import TOKEN, served
from helpers.tiny_models import VOCABULARY, tiny_model
from tailrace.contracts.engine import Engine, TokenCounter
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.weights import Link, Weights
from tailrace.drivers.engine.supervised import SupervisedEngine
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.drivers.weights.transfers import Transfers
from tailrace.extras.http.engine import TOKEN_VARIABLE, HttpEngine
from tailrace.extras.http.self_test import Expected, check_policy, check_server
from tailrace.extras.http.server import JoinedServer
from tailrace.extras.http.settings import VllmEngineSettings
from tailrace.extras.http.vllm import Vllm, detect
from tailrace.types import Sample

DEADLINE_S = 120.0
NUM_TOKENS = 480
"""So many that requests are still under way when a busy machine looks at them."""
SAMPLING = SamplingSettings(max_completion_tokens=NUM_TOKENS)


async def trainer_logprobs(sample: Sample) -> list[float]:
    """Of the first model, by transformers' own forward."""
    ids = torch.tensor([[*sample.prompt.ids, *sample.completion_ids]])
    with torch.no_grad():
        every = tiny_model()(ids).logits[0].float().log_softmax(-1)
    places = torch.arange(len(sample.prompt.ids) - 1, ids.shape[1] - 1)
    return every[places, torch.tensor(sample.completion_ids)].tolist()


async def in_files(weights: Weights, link: Link) -> None:
    """The trainer's half of a transfer in files."""


@dataclass
class Joined:
    """Two engines over two servers that run already: one in this process, one in its own."""

    runner: asyncio.Runner
    weights: Path
    process: "subprocess.Popen[str]"
    engines: list[SupervisedEngine]

    @classmethod
    async def open(
        cls, runner: asyncio.Runner, folder: Path, urls: Sequence[str], process: "subprocess.Popen[str]"
    ) -> "Joined":
        """Join the servers; every self-test runs on both."""
        joined = cls(runner, folder / "weights", process, [])
        expected = Expected(VllmEngineSettings(urls=tuple(urls)), SAMPLING, VOCABULARY, CONTEXT)

        async def check(engine: HttpEngine) -> None:
            await check_server(engine.connection, expected)
            await check_policy(engine, expected, joined.version(0), trainer_logprobs)

        async def find(client: httpx.AsyncClient) -> Vllm:
            return await detect(client, SAMPLING, ())

        def engine(name: str, url: str) -> SupervisedEngine:
            async def begin() -> HttpEngine:
                return HttpEngine(
                    name,
                    JoinedServer(url),
                    find,
                    health_timeout_s=60.0,
                    check=check,
                    transfers=Transfers(in_files),
                    expected=expected_tensors(folder / "model", "float32"),
                    decode=str,
                )

            return SupervisedEngine(name, 128, begin, TokenCounter())

        joined.engines = [engine(f"engine-{number}", url) for number, url in enumerate(urls)]
        await asyncio.gather(*(each.open() for each in joined.engines))
        return joined

    def version(self, version: int) -> Weights:
        """Odd versions are the second model."""
        return Weights(version, str(self.weights / ("new" if version % 2 else "old")))

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Drive a test. The engines are idle afterwards, and have version 0 again."""

        async def whole() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await main
                for engine in self.engines:
                    await engine.load(self.version(0), kv="recompute")
                    usage = engine.usage()
                    assert (usage.num_running, usage.num_waiting, usage.kv_tokens) == (0, 0, 0)

        self.runner.run(whole())


@pytest.fixture(scope="module")
def joined(url: str, folder: Path) -> Iterator[Joined]:
    options = ["--weights-folder", str(folder / "weights"), "--served-model-name", MODEL_NAME]
    with (
        served(folder / "model", *options) as (other, process),
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner() as runner,
    ):
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        joined = runner.run(Joined.open(runner, folder, [url, other], process))
        yield joined
        for engine in joined.engines:
            runner.run(engine.close())


class TestServedEngine(EngineContract):
    NUM_TOKENS = NUM_TOKENS

    @pytest.fixture(autouse=True)
    def _use(self, joined: Joined) -> None:
        self.joined = joined

    def drive(self, main: Main) -> None:
        self.joined.run(main(*self.joined.engines))

    async def under_way(self, engine: Engine, samples: Sequence[Sample]) -> None:
        while not all(sample.num_tokens for sample in samples):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def weights(self, version: int) -> Weights:
        return self.joined.version(version)


def test_what_the_client_finds_out(joined: Joined) -> None:
    engine = joined.engines[0]
    assert engine.capabilities.exact_versions
    assert engine.capabilities.sleep


def test_a_server_whose_engine_dies_ends(joined: Joined) -> None:
    """It comes last: the server is gone."""
    os.kill(worker_of(joined.process.pid, "engine"), signal.SIGKILL)
    assert joined.process.wait(DEADLINE_S) == 1
