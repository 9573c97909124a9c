"""An engine in a process of its own serves as one in this process would."""

import asyncio
import math
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker_cases import DEADLINE_S, VOCABULARY, make_samples

from tailrace.engine.base import EngineSettings, SamplingSettings
from tailrace.engine.native.engine import Delta, NativeEngine, Request
from tailrace.errors import WorkerDied
from tailrace.types import Sample, Span
from tailrace.weights.base import Weights
from tailrace.workers.engine import RemoteEngine
from tailrace.workers.messages import EngineJob

Drive = Callable[[Any], Any]
NUM_TOKENS = 200


def job(model: Path, *, report_every_s: float = 0.5) -> EngineJob:
    sampling = SamplingSettings(max_completion_tokens=NUM_TOKENS)
    engine = EngineSettings(max_running=8)
    return EngineJob(model=model, engine=engine, sampling=sampling, report_every_s=report_every_s)


@asynccontextmanager
async def engine(job: EngineJob, logs: Path) -> AsyncIterator[RemoteEngine]:
    remote = await RemoteEngine.spawn("engine-0", job, logs=logs)
    try:
        await remote.ready()
        yield remote
    finally:
        await remote.close()


@dataclass
class Served:
    """One engine for several tests, on a loop that outlives each of them."""

    runner: asyncio.Runner
    engine: RemoteEngine

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Drive a test, after which the engine must be clean, and say how many tokens it generated."""

        async def checked() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await main
                await self.engine.settle()
                await self.engine.integrity()

        self.runner.run(checked())


@pytest.fixture(scope="module")
def served(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        context = engine(job(model_path, report_every_s=0.0), tmp_path_factory.mktemp("logs"))
        yield Served(runner, runner.run(context.__aenter__()))
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[Delta]:
    """What an engine in this process generates for `make_samples(12)`."""
    settings = job(model_path)
    local = NativeEngine.from_pretrained(settings.model, settings.engine, settings.sampling)
    for sample in make_samples(12):
        local.submit(Request(str(sample.id), sample.prompt.ids, [], sample.seed))
    ended: dict[str, Delta] = {}
    while not local.idle:
        ended |= {delta.id: delta for delta in local.step()}
    return [ended[str(sample.id)] for sample in make_samples(12)]


def check(samples: list[Sample], expected: list[Delta]) -> None:
    assert [sample.completion_ids for sample in samples] == [delta.ids for delta in expected]
    assert [sample.finish_reason for sample in samples] == [delta.finish_reason for delta in expected]
    for sample, delta in zip(samples, expected, strict=True):
        assert sample.behavior_logprobs == pytest.approx(delta.logprobs, abs=1e-4)
        assert sample.spans == [Span(0, len(delta.ids))]


def test_generation_over_the_wire_is_that_of_the_engine(served: Served, expected: list[Delta]) -> None:
    async def main() -> None:
        samples = make_samples(12)
        num_before = served.engine.usage().num_generated
        await asyncio.gather(*(served.engine.generate(sample) for sample in samples))
        check(samples, expected)
        await served.engine.settle()
        usage = served.engine.usage()
        assert usage.num_generated - num_before == sum(sample.num_tokens for sample in samples)
        assert (usage.num_running, usage.num_waiting) == (0, 0)

    served.run(main())


def test_a_sample_grows_while_it_is_generated(served: Served, expected: list[Delta]) -> None:
    async def main() -> None:
        samples = make_samples(12)
        longest = max(samples, key=lambda sample: len(expected[sample.id.number].ids))
        generation = asyncio.gather(*(served.engine.generate(sample) for sample in samples))
        seen = set()
        while not generation.done():
            await asyncio.sleep(0.001)
            seen.add(longest.num_tokens)
        assert len(seen) > 3

    served.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_at_random_moments_no_token_is_lost_and_the_text_is_the_same(
    served: Served, expected: list[Delta], seed: int
) -> None:
    async def live(sample: Sample, chance: random.Random) -> int:
        num_cancelled = 0
        while sample.finish_reason is None:
            generation = asyncio.create_task(served.engine.generate(sample))
            done, _ = await asyncio.wait([generation], timeout=chance.expovariate(1 / 0.02))
            if not done:
                generation.cancel()
                if chance.random() < 0.5:
                    await asyncio.sleep(0)
                    generation.cancel()  # again, while it waits for its last tokens
                with pytest.raises(asyncio.CancelledError):
                    await generation
                num_cancelled += 1
        return num_cancelled

    async def main() -> None:
        samples, chance = make_samples(12), random.Random(seed)
        num_before = served.engine.usage().num_generated
        assert sum(await asyncio.gather(*(live(sample, chance) for sample in samples))) > 0
        check(samples, expected)
        await served.engine.settle()
        num_generated = served.engine.usage().num_generated - num_before
        assert num_generated == sum(sample.num_tokens for sample in samples)

    served.run(main())


def test_published_weights_sign_the_tokens_that_come_after_them(
    served: Served, model_path: Path, tmp_path: Path
) -> None:
    original = model_path / "model.safetensors"
    flat = tmp_path / "flat.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(original).items()}, flat)
    uniform = -math.log(VOCABULARY)

    async def main() -> None:
        samples = make_samples(64)
        generation = asyncio.gather(*(served.engine.generate(sample) for sample in samples))
        while not samples[0].num_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await served.engine.load(Weights(7, str(flat)), kv="keep")
        await generation
        assert any([span.version for span in sample.spans] == [0, 7] for sample in samples)
        for sample in samples:
            assert sample.spans == sorted(sample.spans)
            num_old = sum(span.num_tokens for span in sample.spans if span.version == 0)
            assert uniform not in sample.behavior_logprobs[:num_old]
            assert sample.behavior_logprobs[num_old:] == pytest.approx(
                [uniform] * (sample.num_tokens - num_old)
            )
        await served.engine.load(Weights(0, str(original)), kv="recompute")

    served.run(main())


def test_a_request_already_at_its_limit_ends_at_once_also_when_cancelled(served: Served) -> None:
    async def main() -> None:
        full, aborted = make_samples(2)
        for sample in (full, aborted):
            sample.extend([3] * NUM_TOKENS, [-1.0] * NUM_TOKENS, version=0)
        generation = asyncio.create_task(served.engine.generate(aborted))
        await asyncio.sleep(0)
        generation.cancel()
        await served.engine.generate(full)
        await asyncio.wait([generation])
        assert (full.num_tokens, full.finish_reason) == (NUM_TOKENS, "length")
        assert aborted.num_tokens == NUM_TOKENS

    served.run(main())


def test_a_killed_engine_fails_what_it_served_by_name(model_path: Path, tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        samples = make_samples(4)
        async with engine(job(model_path), tmp_path) as remote:
            os.kill(remote.process.pid, signal.SIGSTOP)  # so that none ends before it is killed
            generations = [asyncio.create_task(remote.generate(sample)) for sample in samples]
            await asyncio.sleep(0.1)
            os.kill(remote.process.pid, signal.SIGKILL)
            errors = await asyncio.gather(*generations, return_exceptions=True)
            assert [type(error) for error in errors] == [WorkerDied] * 4
            assert f"engine-0 (process {remote.process.pid}) ended: signal SIGKILL" in str(errors[0])
            with pytest.raises(WorkerDied, match="engine-0"):
                await remote.generate(samples[0])

    execute(main())
