"""Every stage of PipelineRL is bounded when rewards are slower than the engines (section 4, ring buffers)."""

from functools import cache, partial
from math import ceil
from typing import Any

import pytest

from helpers.virtual import Outcome, simulate
from tailrace.controller.base import RunSettings
from tailrace.record.events import RequestEnded, SampleScored, StagesFilled, Stepped, TokensWasted
from tailrace.schedules.pipelinerl import pipelinerl
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)

STEPS, GROUPS, GROUP_SIZE, IN_FLIGHT, RING = 40, 8, 4, 32, 12
EQUAL = SimLengthSettings(median_tokens=200, sigma=0.0)
UNEQUAL = SimLengthSettings(median_tokens=200, sigma=0.6, max_tokens=1000)


@cache
def slow_rewards(lengths: SimLengthSettings = UNEQUAL, **parameters: Any) -> Outcome:
    """Four reward workers take 1 s a sample; the engine could generate nearly four times as many. Each
    world is played once, and only read."""
    sim = SimSettings(
        engines=SimEngineSettings(count=1, slots=64),
        rewards=SimRewardSettings(workers=4, median_s=1.0, sigma=0.0),
        lengths=lengths,
    )
    schedule = partial(
        pipelinerl,
        groups_per_step=GROUPS,
        in_flight_per_engine=IN_FLIGHT,
        **{"ring_groups": RING, "ring_full": "block"} | parameters,
    )
    return simulate(schedule, RunSettings(rounds=STEPS, group_size=GROUP_SIZE), sim)


def unscored(outcome: Outcome) -> list[int]:
    """Samples that are generated and neither scored nor dropped, at each step."""
    waiting, found = set(), []
    for event in outcome.events:
        match event:
            case RequestEnded(outcome="stop" | "length"):
                waiting.add(event.sample)
            case SampleScored() | TokensWasted():
                waiting.discard(event.sample)
            case Stepped():
                found.append(len(waiting))
    return found


def max_lags(outcome: Outcome) -> list[int]:
    return [max(step.lags.steps) for step in outcome.of(Stepped)]


def blocked_s(outcome: Outcome, stage: str) -> float:
    return sum(event.stages[stage][1] for event in outcome.of(StagesFilled))


def most(outcome: Outcome, stage: str) -> int:
    return max(event.stages[stage][0] for event in outcome.of(StagesFilled))


def test_slow_rewards_neither_pile_samples_up_nor_make_tokens_older_step_after_step() -> None:
    for outcome in (slow_rewards(), slow_rewards(ring_full="drop_oldest")):
        num_groups = (
            2 * RING + IN_FLIGHT + 1
        )  # the ring, the scorers, and those that lacked samples when it filled
        assert max(unscored(outcome)) <= GROUP_SIZE * num_groups
        lags = max_lags(outcome)
        assert max(lags[STEPS // 2 :]) <= max(lags[: STEPS // 2])


def test_a_full_ring_blocks_the_engines_or_drops_and_each_is_reported_by_its_stage() -> None:
    blocking, dropping = slow_rewards(), slow_rewards(ring_full="drop_oldest")
    assert blocking.totals.groups == {"trained": STEPS * GROUPS}
    assert blocking.totals.wasted_tokens.total() == 0
    assert blocked_s(blocking, "generated") > 0.5 * blocking.ended_s
    assert set(dropping.totals.wasted_tokens) == {"generated overflow"}
    assert dropping.totals.groups["dropped"] > dropping.totals.groups["trained"] == STEPS * GROUPS
    assert blocked_s(dropping, "generated") == 0
    assert (most(dropping, "generated"), most(dropping, "scoring")) == (RING, RING)
    assert max(max_lags(dropping)) < max(max_lags(blocking)), "what is dropped is the oldest"
    # Groups with a scorer are not dropped, so the scorers lose no time.
    assert dropping.ended_s == pytest.approx(blocking.ended_s, rel=0.01)


@pytest.mark.parametrize("ring_full", ["block", "drop_oldest"])
@pytest.mark.parametrize(("ring", "scoring"), [(8, None), (12, 2), (12, 40), (32, 8)])
def test_no_token_is_older_than_the_rings_imply(ring: int, scoring: int | None, ring_full: str) -> None:
    outcome = slow_rewards(EQUAL, ring_groups=ring, scoring_groups=scoring, ring_full=ring_full)
    in_flight = ceil(IN_FLIGHT / GROUP_SIZE) + 1
    assert max(max_lags(outcome)) <= (2 * ring + (scoring or ring) + in_flight) / GROUPS + 2
    assert most(outcome, "scoring") <= (scoring or ring)
    assert most(outcome, "generated") <= ring
    assert most(outcome, "ready") <= ring


def test_no_blocking_ring_holds_more_groups_than_its_size_and_none_is_stuck_or_lost() -> None:
    """The trainer is slower than four engines, whose 16 groups in flight end while a ring is full."""
    sim = SimSettings(
        engines=SimEngineSettings(count=4, slots=64),
        rewards=SimRewardSettings(median_s=0.0),
        lengths=UNEQUAL,
        trainer=SimTrainerSettings(step_s=20.0),
    )
    schedule = partial(pipelinerl, groups_per_step=GROUPS, in_flight_per_engine=IN_FLIGHT, ring_full="block")
    for scoring in (None, 1):
        narrow = partial(schedule, ring_groups=RING, scoring_groups=scoring)
        outcome = simulate(narrow, RunSettings(rounds=STEPS, group_size=GROUP_SIZE), sim)
        found = [most(outcome, stage) for stage in ("ready", "scoring", "generated")]
        assert found[:2] == [RING, scoring or RING] and found[2] <= RING
        assert outcome.totals.groups == {"trained": STEPS * GROUPS}
        assert outcome.totals.wasted_tokens.total() == 0


def test_a_full_ready_ring_blocks_and_drops_by_its_own_name() -> None:
    """The trainer is the slow side: rewards take no time."""
    sim = SimSettings(
        engines=SimEngineSettings(count=1, slots=64),
        rewards=SimRewardSettings(median_s=0.0),
        trainer=SimTrainerSettings(step_s=20.0),
    )
    run = RunSettings(rounds=6, group_size=GROUP_SIZE)
    schedule = partial(pipelinerl, groups_per_step=1, in_flight_per_engine=IN_FLIGHT, ring_groups=1)
    dropping = simulate(schedule, run, sim)
    assert set(dropping.totals.wasted_tokens) == {"ready overflow"}
    blocking = simulate(partial(schedule, ring_full="block"), run, sim)
    assert blocking.totals.wasted_tokens.total() == 0 < blocked_s(blocking, "ready")
