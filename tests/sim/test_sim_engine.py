"""The simulated engine keeps the engines' contract, and its times can be computed by hand."""

import asyncio

import pytest

from helpers.episodes import answer
from helpers.virtual import EXACT, change
from tailrace import clock
from tailrace.contracts.weights import Weights
from tailrace.errors import EngineDied, Evicted, VersionGone
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import SimEngineSettings
from tailrace.types import KV, Group, Prompt, Sample, SampleId, Span

pytestmark = pytest.mark.virtual
TEN = EXACT.engines


def sample(number: int = 0, num_prompt_tokens: int = 1) -> Sample:
    group = Group(Prompt(number, range(num_prompt_tokens)), 1, [])
    group.samples = [Sample(SampleId(number, 0, 0), group)]
    return group.samples[0]


def engine_of(cost: SimEngineSettings, length: int = 10) -> SimEngine:
    return SimEngine("engine-0", cost, lambda _: length)


async def test_a_response_takes_its_tokens_times_the_step() -> None:
    engine = engine_of(TEN)
    one = sample()
    await engine.generate(one)
    assert (clock.now(), one.num_tokens, one.finish_reason, one.spans) == (
        10.0,
        10,
        "stop",
        [Span(0, 10)],
    )


async def test_a_step_is_longer_the_more_run_and_prefill_comes_before_it() -> None:
    """Two run: 10 steps of 1 + 2 * 0.25 s, after 2 prompts of 4 positions at 16 a second."""
    cost = change(TEN, slope_s=0.25, prefill_tokens_per_s=16.0)
    engine = engine_of(cost)
    await asyncio.gather(engine.generate(sample(0, 4)), engine.generate(sample(1, 4)))
    assert clock.now() == 0.5 + 15.0
    assert engine.usage().num_prefilled == 8 and engine.usage().num_generated == 20


async def test_a_pinned_sample_ends_on_its_version_or_is_given_back_when_a_load_removes_it() -> None:
    """Two versions at a time, one slot: the first runs, the others wait."""
    engine = engine_of(change(TEN, slots=1, versions=2))
    samples = [sample(number) for number in range(4)]
    for each, pin in zip(samples, (0, 0, 1, None), strict=True):
        each.pin = pin
    await engine.load(Weights(1), kv="keep")
    served = asyncio.gather(*map(engine.generate, samples), return_exceptions=True)
    await asyncio.sleep(4)
    await engine.load(Weights(2), kv="keep")
    assert [type(each) for each in await served] == [VersionGone, VersionGone, type(None), type(None)]
    assert [each.spans for each in samples] == [[Span(0, 4)], [], [Span(1, 10)], [Span(2, 10)]]


async def test_an_engine_that_was_started_again_has_the_newest_version_alone() -> None:
    engine = engine_of(change(TEN, versions=2))
    one = sample()
    one.pin = 1
    await engine.load(Weights(1), kv="keep")
    await engine.load(Weights(2), kv="keep")
    engine.die()
    engine.revive()
    with pytest.raises(VersionGone):
        await engine.generate(one)


async def test_who_finds_no_slot_waits_for_one() -> None:
    ends: list[float] = []

    async def one(engine: SimEngine, number: int) -> None:
        await engine.generate(sample(number))
        ends.append(clock.now())

    engine = engine_of(change(TEN, slots=2))
    await asyncio.gather(*(one(engine, number) for number in range(5)))
    assert ends == [10, 10, 20, 20, 30]


async def test_cancelling_leaves_a_valid_shorter_sample_that_goes_on_from_its_tokens() -> None:
    engine = engine_of(TEN)
    one = sample()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3.5):
            await engine.generate(one)
    assert (one.num_tokens, one.finish_reason) == (3, None)
    assert engine.usage().num_running == 0
    await asyncio.sleep(1.5)
    await engine.generate(one)
    assert (clock.now(), one.num_tokens, one.spans) == (12.0, 10, [Span(0, 10)])
    assert engine.usage().num_generated == 10


async def test_until_an_abort_arrives_the_engine_goes_on() -> None:
    engine = engine_of(change(TEN, abort_s=2.0))
    one = sample()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3.5):
            await engine.generate(one)
    assert (clock.now(), one.num_tokens) == (5.5, 5)


async def test_a_sample_that_ends_before_its_abort_arrives_has_ended() -> None:
    engine = engine_of(change(TEN, abort_s=2.0))
    one = sample()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(9.5):
            await engine.generate(one)
    assert (one.num_tokens, one.finish_reason) == (10, "stop")


async def test_a_load_stands_between_two_tokens_and_ends_nothing() -> None:
    engine = engine_of(change(TEN, load_s=3.0))
    one = sample()
    task = asyncio.ensure_future(engine.generate(one))
    await asyncio.sleep(4)
    await engine.load(Weights(1), kv="keep")
    assert clock.now() == 7.0
    await task
    assert (clock.now(), one.spans) == (13.0, [Span(0, 4), Span(1, 6)])


async def test_recomputing_the_cache_costs_a_prefill_of_all_that_runs() -> None:
    engine = engine_of(change(TEN, prefill_tokens_per_s=16.0))
    one = sample(0, num_prompt_tokens=4)
    task = asyncio.ensure_future(engine.generate(one))
    await asyncio.sleep(4.25)  # 4 prompt positions took a quarter of a second
    await engine.load(Weights(1), kv="recompute")
    assert clock.now() == 4.25 + 8 / 16
    await task
    assert clock.now() == 10.75 and engine.usage().num_prefilled == 12


async def test_a_dead_engine_gives_everything_back_with_its_tokens() -> None:
    engine = engine_of(change(TEN, slots=2))
    samples = [sample(number) for number in range(3)]
    tasks = [asyncio.ensure_future(engine.generate(one)) for one in samples]
    await asyncio.sleep(4)
    engine.die()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineDied] * 3
    assert [one.num_tokens for one in samples] == [4, 4, 0]  # the third waited for a slot
    with pytest.raises(Evicted):
        await engine.generate(samples[0])
    engine.revive()
    await engine.generate(samples[0])
    assert (clock.now(), samples[0].num_tokens) == (10.0, 10)


async def test_when_the_cache_is_full_the_youngest_gives_way_and_loses_no_token() -> None:
    """Room for 16 positions: two samples of 1 + 7 fill it; then the second waits for the end of the first."""
    engine = engine_of(change(TEN, kv_tokens=16))
    samples = [sample(number) for number in range(2)]
    await asyncio.gather(*(engine.generate(one) for one in samples))
    assert [one.num_tokens for one in samples] == [10, 10]
    assert engine.usage().num_preempted >= 1 and engine.usage().num_generated == 20


async def test_a_request_that_arrives_in_the_middle_of_a_step_joins_at_its_end() -> None:
    engine = engine_of(TEN)
    first, second = sample(0), sample(1)
    tasks = [asyncio.ensure_future(engine.generate(first))]
    await asyncio.sleep(3.5)
    await engine.generate(second)
    assert (clock.now(), second.num_tokens) == (14.0, 10)
    await tasks[0]


def siblings(num_prompt_tokens: int) -> list[Sample]:
    group = Group(Prompt(0, range(num_prompt_tokens)), 2, [])
    group.samples = [Sample(SampleId(0, 0, number), group) for number in range(2)]
    return group.samples


async def test_the_prompt_of_a_group_is_computed_once() -> None:
    engine = engine_of(change(TEN, prefill_tokens_per_s=16.0))
    await asyncio.gather(*(engine.generate(one) for one in siblings(4)))
    assert clock.now() == 0.25 + 10.0 and engine.usage().num_prefilled == 4


@pytest.mark.parametrize(
    ("kv_tokens", "kv", "prefilled"),
    [
        (1000, None, 4),  # the cache of the aborted request is kept
        (1000, "keep", 4),
        (1000, "recompute", 4 + 7),  # new weights computed nothing for it
        (16, None, 4 + 3 + 7),  # the other request needed its room
    ],
)
async def test_a_request_that_continues_costs_a_prefill_of_what_the_cache_does_not_hold(
    kv_tokens: int, kv: KV | None, prefilled: int
) -> None:
    engine = engine_of(change(TEN, kv_tokens=kv_tokens))
    one = sample(0, num_prompt_tokens=4)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3.5):
            await engine.generate(one)
    assert one.num_tokens == 3
    if kv_tokens == 16:
        await engine.generate(sample(1, num_prompt_tokens=3))
    if kv:
        await engine.load(Weights(1), kv=kv)
    await engine.generate(one)
    assert engine.usage().num_prefilled == prefilled


@pytest.mark.parametrize(("survival", "drawn", "rest_s"), [(1.0, 600, 0.0), (0.0, 256, 600.0)])
async def test_a_verification_costs_a_prefill_and_half_a_position_of_it_for_each_token_drawn_again(
    survival: float, drawn: int, rest_s: float
) -> None:
    """600 tokens after a prompt of 40 positions, at 160 positions a second: 4 s, and half a position a token.
    The first chunk of 256 ends where the first token differs; then all 600 are generated anew."""
    cost = change(TEN, prefill_tokens_per_s=160.0, verify_positions=0.5, survival=survival, kv_tokens=2000)
    engine, one = engine_of(cost, length=600), sample(0, 40)
    one.max_age = 0
    one.grow(600, 0)
    await engine.load(Weights(1), kv="recompute")
    await engine.generate(one)
    assert clock.now() == 4.0 + drawn / 320 + rest_s
    sums = engine.usage().decoded
    assert (sums.prefilled, sums.verified, sums.prefill_s) == (640, drawn, 4.0 + drawn / 320)
    assert one.spans == [Span(1, 600)]


@pytest.mark.parametrize(("length", "reason"), [(9, "stop"), (10, "length")])
async def test_a_response_as_long_as_the_limit_is_cut_off(length: int, reason: str) -> None:
    engine, one = SimEngine("engine-0", TEN, lambda _: length, max_tokens=10), sample()
    await engine.generate(one)
    assert (one.num_tokens, one.finish_reason) == (length, reason)


async def test_the_environments_tokens_are_computed_and_cached_as_context() -> None:
    engine = engine_of(change(TEN, prefill_tokens_per_s=1e9))
    one = sample(0, 4)
    one.grow(6, 0)
    one.finish_reason = "stop"
    answer(one, [7] * 5)
    task = asyncio.ensure_future(engine.generate(one))
    await asyncio.sleep(2)
    assert engine.usage().kv_tokens == 4 + 6 + 5 + 2
    task.cancel()
    await asyncio.wait([task])
    await engine.generate(one)
    assert engine.usage().num_prefilled == 4 + 6 + 5, "what it kept is not computed again"
    assert (one.num_tokens, engine.usage().kv_tokens) == (10, 0)


async def test_joined_engines_compute_a_prefill_together() -> None:
    """8 positions at 2 a second on each of two devices, then 10 steps of half a second."""
    engine = engine_of(change(TEN, prefill_tokens_per_s=2.0, communication_s=0.0))
    await engine.resize(2)
    start_s = clock.now()
    await engine.generate(sample(0, 8))
    assert clock.now() - start_s == 2.0 + 5.0
    assert engine.usage().decoded.prefill_s == 2.0
