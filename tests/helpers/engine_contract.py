"""The contract of engines (tailrace.contracts.engine.Engine), as tests that every engine's tests inherit."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tailrace.contracts.engine import Engine
from tailrace.contracts.weights import Weights
from tailrace.errors import Evicted, VersionGone
from tailrace.types import KV, Group, Prompt, Sample, SampleId, Span

ATTEMPTS = 10
"""To cancel a completion before it ends: a server may be ahead of its client by many tokens."""


class Ahead(Exception):
    """The completions had ended before the engine was asked for what the test is about."""


Main = Callable[[Engine, Engine], Awaitable[None]]


def fresh_samples(num: int) -> list[Sample]:
    """Unstarted samples of one prompt; a sample's seed is its number."""
    group = Group(Prompt(0, [3, 4, 5]), num, [])
    group.samples = [Sample(SampleId(0, 0, number), group, seed=number) for number in range(num)]
    return group.samples


class EngineContract:
    """Subclasses implement `drive`, `under_way` and `weights`, and set `NUM_TOKENS`."""

    NUM_TOKENS: int
    """Tokens of every completion."""
    SEEDED_NOISE = False
    """The noise of token t of a sample is a function of (seed, t), however it is interrupted or batched."""

    def drive(self, main: Main) -> None:
        """Run main with two idle replicas that have version 0."""
        raise NotImplementedError

    async def under_way(self, engine: Engine, samples: Sequence[Sample]) -> None:
        """Return when the engine has generated some, but not all, tokens of each sample."""
        raise NotImplementedError

    def weights(self, version: int) -> Weights:
        """A publication that the engines can load."""
        raise NotImplementedError

    def test_a_sample_is_extended_until_it_ends(self) -> None:
        async def main(engine: Engine, _: Engine) -> None:
            (sample,) = fresh_samples(1)
            await engine.generate(sample)
            assert sample.num_tokens == self.NUM_TOKENS
            assert sample.finish_reason is not None
            assert sample.spans == [Span(0, self.NUM_TOKENS)]

        self.drive(main)

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_a_cancelled_sample_keeps_its_tokens_and_continues_undisturbed(self, elsewhere: bool) -> None:
        async def main(engine: Engine, other: Engine) -> None:
            (undisturbed,) = fresh_samples(1)
            await engine.generate(undisturbed)
            (sample,) = await self.cancelled(engine, 1)
            await (other if elsewhere else engine).generate(sample)
            assert sample.spans == [Span(0, self.NUM_TOKENS)]
            assert sample.finish_reason == undisturbed.finish_reason
            if self.SEEDED_NOISE:
                assert sample.completion_ids == undisturbed.completion_ids

        self.drive(main)

    @pytest.mark.parametrize("kv", ["keep", "recompute"])
    def test_new_weights_end_nothing_and_sign_the_tokens_after_them(self, kv: KV) -> None:
        async def main(engine: Engine, _: Engine) -> None:
            samples = fresh_samples(4)
            generation = asyncio.gather(*(engine.generate(sample) for sample in samples))
            await self.under_way(engine, samples)
            await engine.load(self.weights(1), kv=kv)
            ended = [sample for sample in samples if sample.finish_reason]
            await generation
            if ended:
                raise Ahead
            for sample in samples:
                assert sample.num_tokens == self.NUM_TOKENS
                assert [span.version for span in sample.spans] == [0, 1]

        self.drive(main)

    def test_a_sample_of_a_version_that_the_engine_does_not_have_is_refused(self) -> None:
        async def main(engine: Engine, _: Engine) -> None:
            pinned, other = fresh_samples(2)
            pinned.pin, other.pin = 0, 7
            with pytest.raises(VersionGone):
                await engine.generate(other)
            await engine.generate(pinned)
            assert other.num_tokens == 0
            assert pinned.spans == [Span(0, self.NUM_TOKENS)]

        self.drive(main)

    def test_usage_counts_requests_and_tokens(self) -> None:
        async def main(engine: Engine, _: Engine) -> None:
            samples = [*await self.cancelled(engine, 2), *fresh_samples(4)[2:]]
            before, had = engine.usage(), sum(sample.num_tokens for sample in samples)
            assert had > 0
            generation = asyncio.gather(*(engine.generate(sample) for sample in samples))
            await self.under_way(engine, samples[2:])
            usage = engine.usage()
            assert usage.num_running + usage.num_waiting == 4
            assert usage.kv_tokens > 0
            await generation
            after = engine.usage()
            assert after.num_generated - before.num_generated == 4 * self.NUM_TOKENS - had
            assert after.num_prefilled > before.num_prefilled
            assert (after.num_running, after.num_waiting, after.kv_tokens) == (0, 0, 0)

        self.drive(main)

    def test_an_engine_put_to_sleep_gives_its_requests_back_and_wakes_with_the_newest_weights(self) -> None:
        async def main(engine: Engine, other: Engine) -> None:
            if not engine.capabilities.sleep:
                pytest.skip("the engine cannot sleep")
            before, samples = engine.usage(), fresh_samples(4)
            generations = [asyncio.ensure_future(engine.generate(sample)) for sample in samples]
            await self.under_way(engine, samples)
            await engine.sleep()
            ended = await asyncio.gather(*generations, return_exceptions=True)
            assert [type(error) for error in ended] == [Evicted] * 4
            assert engine.state == "asleep"
            had, usage = [sample.num_tokens for sample in samples], engine.usage()
            assert all(0 < num_tokens < self.NUM_TOKENS for num_tokens in had)
            assert usage.num_generated - before.num_generated == sum(had)
            assert (usage.num_running, usage.num_waiting, usage.kv_tokens) == (0, 0, 0)
            with pytest.raises(Evicted):
                await engine.generate(samples[0])
            await engine.load(self.weights(1), kv="keep")
            await other.generate(samples[0])
            await engine.wake()
            assert engine.state == "open"
            await asyncio.gather(*(engine.generate(sample) for sample in samples[1:]))
            for num_tokens, sample in zip(had, samples, strict=True):
                assert sample.num_tokens == self.NUM_TOKENS
                version = 0 if sample is samples[0] else 1
                spans = [Span(0, num_tokens), Span(version, self.NUM_TOKENS - num_tokens)]
                assert sample.spans == (spans if version else [Span(0, self.NUM_TOKENS)])
            usage = engine.usage()
            assert usage.num_counted in (None, usage.num_generated)

        self.drive(main)

    async def cancelled(self, engine: Engine, num: int) -> list[Sample]:
        """Samples with some, but not all, of their tokens."""
        for _ in range(ATTEMPTS):
            samples = fresh_samples(num)
            tasks = [asyncio.ensure_future(engine.generate(sample)) for sample in samples]
            await self.under_way(engine, samples)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in ended] == [asyncio.CancelledError] * num
            had = [sample.num_tokens for sample in samples]
            if max(had) < self.NUM_TOKENS:
                assert all(had)
                assert all(sample.finish_reason is None for sample in samples)
                return samples
        raise AssertionError(f"in {ATTEMPTS} attempts the completions ended before they could be cancelled")
