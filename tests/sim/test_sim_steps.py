"""The time of decode steps, by hand."""

import asyncio

import pytest

from helpers.virtual import EXACT, change
from tailrace import clock
from tailrace.sim.engine import SimEngine, Steps
from tailrace.sim.settings import SimEngineSettings
from tailrace.types import Group, Prompt, Sample, SampleId

pytestmark = pytest.mark.virtual

TEN = EXACT.engines


def sample(number: int, num_prompt_tokens: int) -> Sample:
    group = Group(Prompt(number, range(num_prompt_tokens)), 1, [])
    group.samples = [Sample(SampleId(number, 0, 0), group)]
    return group.samples[0]


def test_the_cache_makes_each_step_longer_than_the_one_before() -> None:
    """Two requests of 4 positions: steps of 1 + 0.25 * (8, 10, 12) = 3, 3.5 and 4 s."""
    steps = Steps.of(change(TEN, context_s=0.25), 2, 8)
    assert steps == Steps(3.0, 0.5)
    assert [steps.seconds(0, end) for end in range(4)] == [0, 3.0, 6.5, 10.5]


def test_the_number_of_steps_is_the_inverse_of_their_time() -> None:
    steps = Steps(3.0, 0.5)
    assert [steps.after(0, seconds) for seconds in (0, 1.5, 3.0, 4.75, 6.5, 10.5)] == [0, 0.5, 1, 1.5, 2, 3]
    assert steps.after(0.5, 1.5) == 1.0, "half of the first step was done before"
    assert steps.seconds(0.5, 2) == 1.5 + 3.5


@pytest.mark.parametrize("growth_s", [0.0, 1e-9, 3e-6, 1.0])
def test_a_million_steps_are_whole(growth_s: float) -> None:
    steps = Steps(0.0061, growth_s)
    for number in (1, 17, 4096, 1_000_000):
        assert steps.after(0, steps.seconds(0, number)) == pytest.approx(number, abs=1e-6)


def test_arithmetic_bounds_a_large_batch_and_memory_a_small_one() -> None:
    cost = SimEngineSettings(base_s=1.0, compute_s=0.25, slope_s=0.125, overhead_s=0.5)
    assert Steps.of(cost, 2, 0).first_s == 0.5 + 1.0 + 2 * 0.125
    assert Steps.of(cost, 8, 0).first_s == 0.5 + 2.0 + 8 * 0.125


def test_joined_engines_divide_the_work_and_the_growth_but_not_the_overhead() -> None:
    """Of four: (1 + 4 * 0.5 + 8 * 0.25) / 4 + 2 doublings * 0.125 + 0.5; each step 4 * 0.25 / 4 longer."""
    cost = SimEngineSettings(base_s=1.0, slope_s=0.5, context_s=0.25, communication_s=0.125, overhead_s=0.5)
    assert Steps.of(cost, 4, 8, width=4) == Steps(1.25 + 0.25 + 0.5, 0.25)


def test_a_step_checks_as_many_drafts_as_make_a_token_fastest() -> None:
    """Of two requests: 1.2 s a token; 1.4 s for 1.5 tokens; 1.6 s for 1.75. Of twenty each row costs more."""
    cost = SimEngineSettings(base_s=1.0, slope_s=0.1, acceptance=(0.5, 0.25))
    assert Steps.of(cost, 2, 0) == (pytest.approx(1.6 / 1.75), 0.0, 2)
    assert Steps.of(cost, 20, 0) == (pytest.approx(3.0), 0.0, 0)
    half = cost.changed(draft_share=0.5, context_s=0.25)
    assert Steps.of(half, 2, 8) == (
        pytest.approx((1.0 + 0.1 * 4 + 2.0) / 1.375),
        pytest.approx(0.5 / 1.375),
        2,
    )
    assert Steps.of(half.changed(overhead_s=1.0, communication_s=0.5), 2, 8, width=2) == (
        pytest.approx((3.4 / 2 + 0.5 + 1.0) / 1.375),
        pytest.approx(0.25 / 1.375),
        2,
    )


async def test_drafts_are_counted_and_make_a_response_end_sooner() -> None:
    """Two requests of 30 tokens in steps of 1 s, of which each third gives a request a second token."""
    engine = SimEngine("engine-0", change(TEN, acceptance=(0.5, 0.25), draft_share=2 / 3), lambda _: 30)
    await asyncio.gather(engine.generate(sample(0, 1)), engine.generate(sample(1, 1)))
    assert clock.now() == pytest.approx(20.0) and engine.capabilities.drafts
    usage = engine.usage()
    sums = usage.decoded
    assert (sums.steps, sums.running, sums.drafted, sums.checked, sums.accepted) == (20, 40, 27, 53, 20)
    assert usage.num_generated == sums.generated == 60


def test_acceptance_that_rises_is_refused() -> None:
    with pytest.raises(ValueError, match="acceptance rises"):
        SimEngineSettings(acceptance=(0.5, 0.6))


async def test_a_request_that_joins_makes_the_steps_of_the_other_longer() -> None:
    """Steps of 1 s + 0.25 s a position. The first request has 2 positions: steps of 1.5, 1.75 s. At 3.25 s it
    has 4, and another with 4 positions joins: 8 positions, then 10: 3 and 3.5 s. Then the first has its 4
    tokens. The other has 6 and 7 positions in its last two steps: 2.5 and 2.75 s."""
    ends = []

    async def one(engine: SimEngine, number: int, prompt: int) -> None:
        await engine.generate(sample(number, prompt))
        ends.append(clock.now())

    engine = SimEngine("engine-0", change(TEN, context_s=0.25), lambda _: 4)
    first = asyncio.ensure_future(one(engine, 0, 2))
    await asyncio.sleep(3.25)
    assert engine.usage().kv_tokens == 4
    await asyncio.gather(first, one(engine, 1, 4))
    positions = (2 + 3) + (8 + 10) + (6 + 7)
    sums = engine.usage().decoded
    assert (sums.steps, sums.running, sums.positions, sums.seconds) == (6, 8, positions, ends[1])
    assert ends == [3.25 + 6.5, 3.25 + 6.5 + 5.25]


async def test_a_report_in_mid_step_changes_no_time() -> None:
    """One position, 4 tokens: 1 + 0.25 * (1 + 2 + 3 + 4) / 4 on average, 6.5 s in all."""
    engine = SimEngine("engine-0", change(TEN, context_s=0.25), lambda _: 4)
    task = asyncio.ensure_future(engine.generate(sample(0, 1)))
    for _ in range(6):
        await asyncio.sleep(1.0)
        engine.report()
    await task
    assert clock.now() == 4 + 0.25 * (1 + 2 + 3 + 4)
