"""Lower bounds by hand, in words, and below the main time of every schedule in set-ups drawn at random.

In the world by hand a token is one second, whatever runs beside it, and a trained position (one prompt token
and the completion, of each sample) is one second. A group has two samples, so one of 10 tokens takes 10 s,
and 22 s of training.
"""

import random
from functools import partial

import pytest

from helpers.record_story import Collector, Story, make_group, play
from helpers.virtual import EXACT, NEVER_STOP, SCHEDULES_BY_NAME, Outcome, change, simulate, worlds
from tailrace.controller.base import RunSettings
from tailrace.record.bounds import RoundBound
from tailrace.record.events import RequestStarted, RoundEnded, RoundStarted, Row
from tailrace.record.figures import rounds_of
from tailrace.rollout.admission import Frontier
from tailrace.rollout.placement import DeviceSharing, Kind
from tailrace.schedules.april import april
from tailrace.schedules.pipelinerl import pipelinerl
from tailrace.schedules.rolloutpipe import rolloutpipe
from tailrace.schedules.serial import serial
from tailrace.schedules.tailrace import tailrace
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)

PAIRS = RunSettings(rounds=1, group_size=2)
ONE_BY_ONE = change(EXACT, engines=change(EXACT.engines, slots=2))
"""Room for one group: they complete at 10, 20, 30, ... s."""


def bounded(outcome: Outcome) -> list[tuple[Row, RoundBound]]:
    play(outcome.events, collector := Collector())
    return list(zip(rounds_of(collector.rows), collector.bounds, strict=True))


def main_time_and_bound(row: Row) -> tuple[float, float]:
    return row["round/main_time_s"], row["round/bound_s"]


def times(outcome: Outcome) -> list[tuple[float, float]]:
    """The main time and the bound of each round."""
    return [pytest.approx(main_time_and_bound(row)) for row, _ in bounded(outcome)]


def run_of(outcome: Outcome) -> tuple[float, float]:
    """The time of the run and its bound."""
    _, bound = bounded(outcome)[-1]
    return bound.run_time_s, bound.run_bound_s


def test_serial_is_above_the_first_group_and_all_training_which_rolloutpipe_reaches() -> None:
    """10 s and 3 * 22 s of training. The longest response alone: 10 + 22; 60 tokens at 2 a second: 30."""
    for schedule, main_s in ((serial, 96), (rolloutpipe, 76)):
        outcome = simulate(partial(schedule, groups_per_round=3, groups_per_step=1), PAIRS, ONE_BY_ONE)
        assert times(outcome) == [(main_s, 76)]


def test_all_tokens_take_at_least_their_number_at_the_peak_rate() -> None:
    """A trainer of 1,000 positions a second: 60 tokens at 2 a second, and no optimizer step."""
    sim = change(ONE_BY_ONE, trainer=change(EXACT.trainer, tokens_per_s=1000.0))
    outcome = simulate(partial(serial, groups_per_round=3, groups_per_step=3), PAIRS, sim)
    assert times(outcome) == [(30 + 0.066, 30)]


def test_the_longest_response_is_followed_by_its_own_training_and_a_step() -> None:
    """Group 1 takes 40 s, 40 / 50 of the training of 104 s (80 of 100 tokens), and a step of 3 s."""
    sim = change(EXACT, trainer=change(EXACT.trainer, step_s=3.0))
    parts = worlds(sim, lambda sample: 40 if sample.prompt.index == 1 else 10)
    outcome = simulate(partial(serial, groups_per_round=2, groups_per_step=2), PAIRS, sim, parts=parts)
    assert times(outcome) == [(40 + 104 + 3, 40 + 0.8 * 104 + 3)]


def test_a_reward_comes_before_the_training_of_its_group() -> None:
    """Groups are generated at 10 and 20 s, and complete 5 s later."""
    sim = change(EXACT, rewards=change(EXACT.rewards, median_s=5.0, sigma=0.0))
    schedule = partial(rolloutpipe, groups_per_round=2, groups_per_step=1, admission=Frontier(groups=1))
    assert times(simulate(schedule, PAIRS, sim)) == [(15 + 44, 10 + 5 + 44)]


def test_the_tokens_that_april_carries_are_given() -> None:
    """Group 1 has 10 of its 20 tokens at the start of round 1; it takes 10 s and 42 s. The run: group 0 after
    10 s, then 22 + 42 s of training, in 84 s."""
    parts = worlds(EXACT, lambda sample: 20 if sample.prompt.index == 1 else 10)
    schedule = partial(april, groups_per_round=1, groups_launched=2)
    outcome = simulate(schedule, change(PAIRS, rounds=2), EXACT, parts=parts)
    assert times(outcome) == [(32, 32), (52, 52)]
    assert run_of(outcome) == (84, 74)


def test_the_tokens_of_a_request_that_goes_on_over_a_publication_are_given_in_part() -> None:
    """Group 1 has 32 of its 40 tokens at 32 s, when round 1 begins: 8 s and 2 * 41 s are left."""
    parts = worlds(EXACT, lambda sample: {0: 10, 1: 40, 2: 100}[sample.prompt.index])
    schedule = partial(tailrace, groups_per_step=1, groups_in_flight=2, staleness=1)
    outcome = simulate(schedule, change(PAIRS, rounds=2), EXACT, parts=parts)
    assert times(outcome) == [(32, 32), (90, 90)]


def test_a_round_whose_groups_were_complete_before_it_is_bounded_by_their_training() -> None:
    """PipelineRL trains groups of 10, 10 and 40 tokens, complete at 10, 20 and 40 s; rounds 1 and 2 begin at
    32 and 54 s."""
    parts = worlds(EXACT, lambda sample: 40 if sample.prompt.index == 1 else 10)
    schedule = partial(pipelinerl, groups_per_step=1, in_flight_per_engine=4, ring_groups=4)
    outcome = simulate(schedule, change(PAIRS, rounds=3), EXACT, parts=parts)
    assert times(outcome) == [(32, 32), (22, 22), (82, 82)]
    assert run_of(outcome) == (136, 10 + 22 + 22 + 82)


def test_devices_in_turn_generate_first_and_then_train() -> None:
    """60 tokens at 2 a second, 66 s of training, an engine that needs no time to sleep."""
    sim = change(ONE_BY_ONE, engines=change(ONE_BY_ONE.engines, sleep_s=0.0, wake_s=0.0))
    schedule = partial(serial, groups_per_round=3, groups_per_step=3)
    outcome = simulate(schedule, PAIRS, sim, sharing=DeviceSharing("colocated"))
    assert times(outcome) == [(96, 96)]


def test_a_round_that_is_faster_than_the_peak_rate_so_far_is_not_below_its_bound() -> None:
    """20 responses one after another at 1 token a second; then two at once at 10. A request that has not
    ended keeps the first 20 in the peak rate, so the two alone do not change it."""
    story = Story()
    slow, fast = make_group(0, [1] * 20, [1.0] * 20), make_group(1, [10, 10], [1.0, 0.0])
    straggler = make_group(2, [1], [1.0]).samples[0]
    story.tell(RoundStarted(0.0, 0, version=0), RequestStarted(0.0, straggler.id, "engine-0", 0))
    for number, sample in enumerate(slow.samples):
        story.request(sample, number, number + 1)
    story.train(slow, 20.0, 20.0, 25.0)
    story.tell(RoundEnded(25.0, 0), RoundStarted(26.0, 1, version=0))
    for sample in fast.samples:
        story.request(sample, 26.0, 27.0)
    story.train(fast, 27.0, 27.0, 32.0)
    story.tell(RoundEnded(32.0, 1))
    play(story.events, collector := Collector())
    assert [main_time_and_bound(row) for row in rounds_of(collector.rows)] == [(25, 25), (6, 6)]


@pytest.mark.parametrize(
    ("reward_s", "words"),
    [
        (
            0.0,
            "round 1 took 96.0 s, 76.0 s would do for its first group, then all training; "
            "the trainer waited 30.0 s for sample 2.0/0 on engine-0",
        ),
        (
            40.0,
            "round 1 took 136.0 s, 116.0 s would do for its first group, then all training; "
            "the trainer waited 40.0 s for the reward of sample 2.0/0",
        ),
    ],
)
def test_the_words_name_the_longest_wait_and_the_straggler(reward_s: float, words: str) -> None:
    sim = change(ONE_BY_ONE, rewards=change(EXACT.rewards, median_s=reward_s, sigma=0.0, timeout_s=60.0))
    ((_, bound),) = bounded(simulate(partial(serial, groups_per_round=3, groups_per_step=1), PAIRS, sim))
    assert bound.gap == words


def drawn(number: int) -> SimSettings:
    """A set-up drawn at random."""
    chance = random.Random(number)
    return SimSettings(
        engines=SimEngineSettings(
            versions=3,
            count=chance.choice([2, 4]),
            slots=chance.choice([24, 40]),
            base_s=chance.uniform(2e-3, 20e-3),
            slope_s=chance.uniform(0.0, 0.5e-3),
            context_s=chance.choice([0.0, 1e-6]),
            load_s=chance.uniform(0.0, 4.0),
            kv_tokens=chance.choice([20_000, 10_000_000]),
        ),
        trainer=SimTrainerSettings(
            tokens_per_s=chance.uniform(2000.0, 60_000.0),
            step_s=chance.uniform(0.0, 2.0),
            pass_s=chance.uniform(0.0, 0.5),
            publish_s=chance.uniform(0.0, 2.0),
            drift=0.1,
        ),
        lengths=SimLengthSettings(
            median_tokens=chance.randint(100, 1000), sigma=chance.uniform(0.3, 1.5), max_tokens=6000
        ),
        rewards=SimRewardSettings(workers=8, median_s=chance.uniform(0.05, 5.0), timeout_s=300.0),
    )


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_no_schedule_falls_below_its_bounds(name: str) -> None:
    kinds: list[Kind] = ["disaggregated"] if name in NEVER_STOP else ["disaggregated", "colocated", "elastic"]
    for number, kind in enumerate(kinds):
        settings = RunSettings(rounds=2, group_size=4, seed=number)
        outcome = simulate(SCHEDULES_BY_NAME[name], settings, drawn(number), sharing=DeviceSharing(kind))
        rounds = bounded(outcome)
        assert rounds
        for row, bound in rounds:
            assert 0 < row["round/bound_s"] <= row["round/main_time_s"] * (1 + 1e-9)
            assert 0 < bound.run_bound_s <= bound.run_time_s * (1 + 1e-9)
