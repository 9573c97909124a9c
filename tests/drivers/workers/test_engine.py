"""An engine in a process of its own keeps the contract, and generates what one in this process would."""

import asyncio
import math
import os
import random
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.engine_contract import EngineContract, Main, fresh_samples
from helpers.episodes import answer
from helpers.processes import DEADLINE_S
from helpers.tiny_models import VOCABULARY, save_tiny_model
from helpers.worker_cases import process_of, start_engine
from tailrace.clock import who_waits
from tailrace.contracts.engine import Engine, GenerationOutput, GenerationRequest, TokenCounter
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.contracts.weights import Weights
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.engine.supervised import SupervisedEngine, watch_engines
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.workers.engine import EngineJob, RemoteEngine
from tailrace.errors import EngineDied
from tailrace.types import Sample, Span

NUM_TOKENS = 200
ORIGINAL = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


def job(model: Path, *, report_every_s: float = 0.5, health_timeout_s: float = 60.0) -> EngineJob:
    sampling = SamplingSettings(max_completion_tokens=NUM_TOKENS)
    engine = NativeEngineSettings(max_num_seqs=8, health_timeout_s=health_timeout_s)
    return EngineJob(model=model, engine=engine, sampling=sampling, report_every_s=report_every_s)


@asynccontextmanager
async def opened(num: int, job: EngineJob, logs: Path) -> AsyncIterator[list[RemoteEngine]]:
    engines = [await start_engine(f"engine-{number}", job, logs) for number in range(num)]
    try:
        await asyncio.gather(*(engine.ready() for engine in engines))
        yield engines
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


@asynccontextmanager
async def supervised(num: int, job: EngineJob, logs: Path) -> AsyncIterator[list[SupervisedEngine]]:
    def engine(name: str) -> SupervisedEngine:
        return SupervisedEngine(
            name, job.engine.max_num_seqs, lambda: start_engine(name, job, logs), TokenCounter()
        )

    engines = [engine(f"engine-{number}") for number in range(num)]
    try:
        await asyncio.gather(*(engine.open() for engine in engines))
        watching = asyncio.create_task(watch_engines(engines, recovery_timeout_s=DEADLINE_S))
        yield engines
        watching.cancel()
        await asyncio.wait([watching])
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


@dataclass
class Served:
    """Two engines for several tests, on a loop that outlives each of them."""

    runner: asyncio.Runner
    model: Path
    engines: list[SupervisedEngine]

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Drive a test. The engines are idle afterwards and have the original weights."""

        async def whole() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await main
                for engine in self.engines:
                    await engine.load(Weights(0, str(self.model / ORIGINAL)), kv="recompute")
                    usage = engine.usage()
                    assert (usage.num_running, usage.num_waiting, usage.kv_tokens) == (0, 0, 0)

        self.runner.run(whole())


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        context = supervised(2, job(model, report_every_s=0.0), tmp_path_factory.mktemp("logs"))
        yield Served(runner, model, runner.run(context.__aenter__()))
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[GenerationOutput]:
    """What an engine in this process generates for `fresh_samples(12)`."""
    settings = job(model)
    local = NativeEngine(settings.model, settings.engine, settings.sampling)
    for sample in fresh_samples(12):
        local.submit(GenerationRequest(str(sample.id), sample.prompt.ids, [], sample.seed))
    ended: dict[str, GenerationOutput] = {}
    while not local.idle:
        ended |= {output.id: output for output in local.step()}
    return [ended[str(sample.id)] for sample in fresh_samples(12)]


class TestRemoteEngine(EngineContract):
    NUM_TOKENS = NUM_TOKENS
    SEEDED_NOISE = True

    @pytest.fixture(autouse=True)
    def _use(self, served: Served) -> None:
        self.served = served

    def drive(self, main: Main) -> None:
        self.served.run(main(*self.served.engines))

    async def under_way(self, engine: Engine, samples: Sequence[Sample]) -> None:
        while not all(sample.num_tokens for sample in samples):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def weights(self, version: int) -> Weights:
        return Weights(version, str(self.served.model / ORIGINAL))


def check(samples: list[Sample], expected: list[GenerationOutput]) -> None:
    assert [sample.completion_ids for sample in samples] == [output.ids for output in expected]
    assert [sample.finish_reason for sample in samples] == [output.finish_reason for output in expected]
    for sample, output in zip(samples, expected, strict=True):
        assert sample.behavior_logprobs == pytest.approx(output.behavior_logprobs, abs=1e-4)
        assert sample.spans == [Span(0, len(output.ids))]


def test_generation_over_the_wire_is_that_of_the_engine(
    served: Served, expected: list[GenerationOutput]
) -> None:
    async def main() -> None:
        samples = fresh_samples(12)
        await asyncio.gather(*(served.engines[0].generate(sample) for sample in samples))
        check(samples, expected)

    served.run(main())


def test_a_sample_grows_while_it_is_generated(served: Served, expected: list[GenerationOutput]) -> None:
    async def main() -> None:
        samples = fresh_samples(12)
        longest = max(samples, key=lambda sample: len(expected[sample.id.number].ids))
        generation = asyncio.gather(*(served.engines[0].generate(sample) for sample in samples))
        seen = set()
        while not generation.done():
            await asyncio.sleep(0.001)
            seen.add(longest.num_tokens)
        assert len(seen) > 3

    served.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_at_random_moments_no_token_is_lost_and_the_text_is_the_same(
    served: Served, expected: list[GenerationOutput], seed: int
) -> None:
    async def live(sample: Sample, chance: random.Random) -> int:
        num_cancelled = 0
        while sample.finish_reason is None:
            generation = asyncio.create_task(served.engines[0].generate(sample))
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
        samples, chance = fresh_samples(12), random.Random(seed)
        num_before = served.engines[0].usage().num_generated
        assert sum(await asyncio.gather(*(live(sample, chance) for sample in samples))) > 0
        check(samples, expected)
        num_generated = served.engines[0].usage().num_generated - num_before
        assert num_generated == sum(sample.num_tokens for sample in samples)

    served.run(main())


def test_published_weights_sign_the_tokens_that_come_after_them(
    served: Served, model: Path, tmp_path: Path
) -> None:
    original = model / ORIGINAL
    flat = tmp_path / "flat.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(original).items()}, flat)
    uniform = -math.log(VOCABULARY)

    async def main() -> None:
        samples = fresh_samples(64)
        generation = asyncio.gather(*(served.engines[0].generate(sample) for sample in samples))
        while not samples[0].num_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await served.engines[0].load(Weights(7, str(flat)), kv="keep")
        await generation
        assert any([span.version for span in sample.spans] == [0, 7] for sample in samples)
        for sample in samples:
            assert sample.spans == sorted(sample.spans)
            num_old = sum(span.num_tokens for span in sample.spans if span.version == 0)
            assert uniform not in sample.behavior_logprobs[:num_old]
            assert sample.behavior_logprobs[num_old:] == pytest.approx(
                [uniform] * (sample.num_tokens - num_old)
            )

    served.run(main())


def test_a_request_already_at_its_limit_ends_at_once_also_when_cancelled(served: Served) -> None:
    async def main() -> None:
        full, aborted = fresh_samples(2)
        for sample in (full, aborted):
            sample.extend([3] * NUM_TOKENS, [-1.0] * NUM_TOKENS, version=0)
        generation = asyncio.create_task(served.engines[0].generate(aborted))
        await asyncio.sleep(0)
        generation.cancel()
        await served.engines[0].generate(full)
        await asyncio.wait([generation])
        assert (full.num_tokens, full.finish_reason) == (NUM_TOKENS, "length")
        assert aborted.num_tokens == NUM_TOKENS

    served.run(main())


def test_turns_share_one_limit_and_their_log_probs_are_those_of_the_whole_episode(served: Served) -> None:
    """The second turn is interrupted in one of two equal episodes."""
    whole, parked = (fresh_samples(1)[0] for _ in range(2))
    reference = PolicyModel.load(served.model, TrainerSettings(), temperature=1.0)

    async def cut_after(sample: Sample, num: int) -> None:
        generation = asyncio.create_task(served.engines[0].generate(sample))
        while sample.num_tokens < num:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        generation.cancel()
        await asyncio.wait([generation])

    async def main() -> None:
        await cut_after(whole, 20)
        # Both have the first turn that the cut happened to leave.
        parked.extend(whole.completion_ids, whole.behavior_logprobs, 0)
        for sample in (whole, parked):
            sample.finish_reason = "stop"
            answer(sample, [9, 8, 7, 6])
        await served.engines[0].generate(whole)
        await cut_after(parked, parked.num_tokens + 5)
        await served.engines[1].generate(parked)

    served.run(main())
    assert whole.num_tokens == NUM_TOKENS and whole.finish_reason == "length"
    assert parked.completion_ids == whole.completion_ids
    for sample in (whole, parked):
        (recomputed,) = reference.logprobs_of([TrainingSample.of(sample)])
        assert sample.behavior_logprobs == pytest.approx(recomputed, abs=1e-4)


async def test_a_killed_engine_gives_back_what_it_served_and_names_the_cause(
    model: Path, tmp_path: Path
) -> None:
    samples = fresh_samples(4)
    async with opened(1, job(model), tmp_path) as (remote,):
        os.kill(remote.worker.process.pid, signal.SIGSTOP)  # so that none ends before it is killed
        generations = [asyncio.create_task(remote.generate(sample)) for sample in samples]
        await asyncio.sleep(0.1)
        generations[3].cancel()
        os.kill(remote.worker.process.pid, signal.SIGKILL)
        errors = await asyncio.gather(*generations, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineDied] * 3 + [asyncio.CancelledError]
        assert f"engine-0 (process {remote.worker.process.pid}) ended: signal SIGKILL" in str(errors[0])
        assert await remote.died() == str(errors[0])
        assert remote.usage().num_counted is None
        for call in (remote.generate(samples[0]), remote.load(Weights(1, ""), kv="keep"), remote.sleep()):
            with pytest.raises(EngineDied, match="engine-0"):
                await call


async def test_a_cancelled_request_of_an_engine_that_nobody_watches_ends_though_it_is_stopped(
    model: Path, tmp_path: Path
) -> None:
    async with opened(1, job(model, health_timeout_s=1.0), tmp_path) as (remote,):
        generation = asyncio.create_task(remote.generate(sample := fresh_samples(1)[0]))
        await asyncio.sleep(0.1)
        os.kill(remote.worker.process.pid, signal.SIGSTOP)
        generation.cancel()
        await asyncio.sleep(0.1)
        generation.cancel()
        assert who_waits() == "engine-0: abort"
        await asyncio.wait_for(asyncio.wait([generation]), 30)
        assert generation.cancelled() and sample.finish_reason is None
        why = "engine-0 did not answer for 1 s (engine.health_timeout_s) and was killed"
        assert await asyncio.wait_for(remote.died(), 30) == why


async def test_a_stopped_engine_is_killed_and_replaced_and_its_samples_go_on(
    model: Path, tmp_path: Path, expected: list[GenerationOutput]
) -> None:
    settings = job(model, report_every_s=0.0, health_timeout_s=2.0)
    async with supervised(1, settings, tmp_path) as (engine,):
        states: list[tuple[str, str]] = []
        engine.on_state = lambda why: states.append((engine.state, why))
        samples, hung = fresh_samples(12), process_of(engine)
        generations = [asyncio.create_task(engine.generate(sample)) for sample in samples]
        while not any(sample.num_tokens for sample in samples):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        os.kill(hung.pid, signal.SIGSTOP)
        ended = await asyncio.gather(*generations, return_exceptions=True)
        lost = [sample for sample, error in zip(samples, ended, strict=True) if error is not None]
        assert lost and all(isinstance(error, EngineDied | None) for error in ended)
        while engine.state != "open":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        why = "did not answer for 2 s (engine.health_timeout_s) and was killed"
        assert states == [("dead", f"engine-0 {why}"), ("open", "it was restarted")]
        await asyncio.gather(*(engine.generate(sample) for sample in lost))
        check(samples, expected)
        usage = engine.usage()
        assert usage.num_counted == usage.num_generated == sum(sample.num_tokens for sample in samples)
