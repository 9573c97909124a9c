"""The figures of a lap, from the events of a schedule in virtual time."""

import dataclasses
from functools import partial

import msgspec
import pytest
from record_story import play

from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, Outcome, change, simulate
from tailrace.record.events import Event, GroupEnded, RoundEnded, RoundStarted, Stepped
from tailrace.record.figures import Row, summed
from tailrace.record.steps import StepMeter
from tailrace.record.summary import LapMeter, Summary
from tailrace.schedules import SCHEDULES

LONGER = change(SETTINGS, rounds=6)
MAX_TOKENS = 6000


def measured(outcome: Outcome, warm_up_rounds: int = 0) -> Row:
    meter = LapMeter(warm_up_rounds=warm_up_rounds)
    steps = StepMeter(meter, wall_clock=lambda: 0.0)
    for event in outcome.events:
        steps.on(event)
    steps.close()
    return meter.lap()


def test_throughput_counts_the_samples_of_the_counted_rounds_over_their_whole_time() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["serial"], LONGER)
    start, end = outcome.of(RoundStarted)[2].time_s, outcome.of(RoundEnded)[-1].time_s
    lap = measured(outcome, warm_up_rounds=2)
    assert lap["samples_per_s"] == pytest.approx(4 * 16 * 4 / (end - start))
    trained = [sample for step in outcome.of(Stepped) if step.end_s > start for sample in step.samples]
    assert lap["tokens_per_s"] == pytest.approx(sum(s.num_tokens for s in trained) / (end - start))
    assert lap["main_s_per_1000_samples"] == pytest.approx(1000 * lap["main_time_s"] / (16 * 4))


def test_lengths_are_those_of_the_trained_samples() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["serial"], LONGER)
    lengths = [sample.num_tokens for step in outcome.of(Stepped) for sample in step.samples]
    lap = measured(outcome)
    assert lap["length_mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert lap["length_max"] == max(lengths) == MAX_TOKENS
    assert lap["truncated_share"] == lengths.count(MAX_TOKENS) / len(lengths) > 0


def test_the_time_between_rounds_counts_if_generation_goes_on_in_it() -> None:
    """A checkpoint of 1,000 s before the third round delays both schedules. The rollout of the one that stops
    is over before it."""
    for name, stops in (("serial", True), ("pipelinerl", False)):
        outcome = simulate(SCHEDULES_BY_NAME[name], LONGER)
        plain = measured(outcome)
        started = outcome.events.index(outcome.of(RoundStarted)[2])
        rest = [later(event, 1000.0) for event in outcome.events[started:]]
        slower = measured(Outcome(events=[*outcome.events[:started], *rest]))
        whole_s = outcome.of(RoundEnded)[-1].time_s - outcome.of(RoundStarted)[0].time_s
        cut = whole_s / (whole_s + 1000)
        assert slower["samples_per_s"] == pytest.approx(plain["samples_per_s"] * cut)
        same = plain["rollout_tokens_per_s"] * (1.0 if stops else cut)
        assert slower["rollout_tokens_per_s"] == pytest.approx(same)


def later(event: Event, later_s: float) -> Event:
    """The event, so much later."""
    names = [name for name in ("time_s", "start_s", "end_s") if hasattr(event, name)]
    replaced = dataclasses.replace if isinstance(event, Stepped) else msgspec.structs.replace
    return replaced(event, **{name: getattr(event, name) + later_s for name in names})


def test_the_lag_is_in_optimizer_steps_and_the_staleness_in_publications() -> None:
    """Conventional RL: one publication for 4 steps, so lags of 0 to 3 in batches of about equal size."""
    conventional = partial(SCHEDULES["conventional"], groups_per_step=4, steps_per_round=4)
    lap = measured(simulate(conventional, LONGER))
    assert (lap["lag_max"], lap["staleness_max"]) == (3, 0)
    assert 1.0 < lap["lag_mean"] < 2.0
    assert lap["carried_tokens"] == lap["carried_samples"] == 0.0


def test_april_carries_tokens_over_and_wastes_none() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["april"], LONGER)
    lap = measured(outcome)
    old = sum(n for step in outcome.of(Stepped) for age, n in step.lags.publications.items() if age)
    assert lap["carried_tokens"] == pytest.approx(old / outcome.totals.trained_tokens)
    assert 0 < lap["carried_tokens"] < 1 and lap["waste_share"] == 0.0
    assert lap["deferrals_max"] > 0 and lap["staleness_max"] > 0


def test_the_waste_of_a_race_is_its_share_of_all_generated_tokens() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["tailbatch"], LONGER)
    totals = outcome.totals
    generated = totals.trained_tokens + totals.wasted_tokens.total()
    assert measured(outcome)["waste_share"] == pytest.approx(totals.wasted_tokens.total() / generated)


def test_every_trained_group_is_counted_once() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["rollpacker"], LONGER)
    play(outcome.events, summary := Summary())
    trained = [event for event in outcome.of(GroupEnded) if event.fate == "trained"]
    assert summed(summary.rows, "round/num_groups") == summed(summary.rows, "groups/trained") == len(trained)
