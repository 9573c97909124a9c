"""What a lap comes to, from the record of a schedule in virtual time."""

import dataclasses
from functools import partial

import msgspec
import pytest

from tailrace.commands.laps import Lap, LapMeter
from tailrace.commands.probe import Probe
from tailrace.record.events import Event, GroupEnded, RoundEnded, RoundStarted, Stepped
from tailrace.schedules import SCHEDULES
from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, Outcome, change, simulate

LONGER = change(SETTINGS, rounds=6)


def measured(outcome: Outcome, *, warm_up_rounds: int = 0, probes: list[Probe] | None = None) -> Lap:
    meter = LapMeter(warm_up_rounds)
    for event in outcome.events:
        meter.on(event)
    meter.close()
    return meter.lap(probes or [], 0.8)


def test_throughput_counts_the_samples_of_the_counted_rounds_over_their_whole_time() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["serial"], LONGER)
    start, end = outcome.of(RoundStarted)[2].time_s, outcome.of(RoundEnded)[-1].time_s
    lap = measured(outcome, warm_up_rounds=2)
    assert lap.samples_per_s == pytest.approx(4 * 16 * 4 / (end - start))
    trained = [sample for step in outcome.of(Stepped) if step.end_s > start for sample in step.samples]
    assert lap.tokens_per_s == pytest.approx(sum(s.num_tokens for s in trained) / (end - start))


def test_what_lies_between_rounds_counts_where_generation_goes_on_meanwhile() -> None:
    """A checkpoint of 1,000 s before the third round: both schedules pay for it, but the rollout of the one
    that stops is over before."""
    for name, stops in (("serial", True), ("pipelinerl", False)):
        outcome = simulate(SCHEDULES_BY_NAME[name], LONGER)
        plain = measured(outcome)
        started = outcome.events.index(outcome.of(RoundStarted)[2])
        rest = [later(event, 1000.0) for event in outcome.events[started:]]
        slower = measured(Outcome(events=[*outcome.events[:started], *rest]))
        whole_s = outcome.of(RoundEnded)[-1].time_s - outcome.of(RoundStarted)[0].time_s
        cut = whole_s / (whole_s + 1000)
        assert slower.samples_per_s == pytest.approx(plain.samples_per_s * cut)
        same = plain.rollout_tokens_per_s * (1.0 if stops else cut)
        assert slower.rollout_tokens_per_s == pytest.approx(same)


def later(event: Event, later_s: float) -> Event:
    """The event, so much later."""
    names = [name for name in ("time_s", "start_s", "end_s") if hasattr(event, name)]
    replaced = dataclasses.replace if isinstance(event, Stepped) else msgspec.structs.replace
    return replaced(event, **{name: getattr(event, name) + later_s for name in names})


def test_staleness_is_in_optimizer_steps_over_all_trained_tokens() -> None:
    """Conventional RL: one publication for G = 4 steps, so lags of 0 to 3 in batches of about equal size."""
    lap = measured(simulate(partial(SCHEDULES["conventional"], groups_per_step=4, steps_per_round=4), LONGER))
    assert lap.staleness_max == 3
    assert 1.0 < lap.staleness_mean < 2.0
    assert lap.carried_tokens == lap.carried_samples == 0.0


def test_april_carries_tokens_over_and_wastes_none() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["april"], LONGER)
    lap = measured(outcome)
    old = sum(n for step in outcome.of(Stepped) for lag, n in step.lags.publications.items() if lag)
    assert lap.carried_tokens == pytest.approx(old / outcome.totals.trained_tokens)
    assert 0 < lap.carried_tokens < 1 and lap.waste_share == 0.0 and lap.deferrals_max > 0


def test_the_waste_of_a_race_is_its_share_of_what_was_generated() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["tailbatch"], LONGER)
    totals = outcome.totals
    generated = totals.trained_tokens + totals.wasted_tokens.total()
    assert measured(outcome).waste_share == pytest.approx(totals.wasted_tokens.total() / generated)


def lengths_of(outcome: Outcome) -> dict[int, list[int]]:
    """Of the trained responses to each prompt."""
    lengths: dict[int, list[int]] = {}
    for step in outcome.of(Stepped):
        for sample in step.samples:
            lengths.setdefault(sample.id.prompt, []).append(sample.num_tokens)
    return lengths


def test_length_bias_is_against_uninterrupted_responses() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["serial"], LONGER)
    lengths = lengths_of(outcome)
    halves = [{i: n for i, n in lengths.items() if (i < 48) == early} for early in (True, False)]
    probes = [Probe(0, 0.5, halves[0]), Probe(3, 0.6, halves[1]), Probe(6, 0.7, {})]
    assert measured(outcome, probes=probes).length_bias == pytest.approx(0.0)
    probes = [Probe(0, 0.5, {index: [n * 2 for n in of] for index, of in lengths.items()})]
    assert measured(outcome, probes=probes).length_bias == pytest.approx(-0.5)


def test_a_prompt_that_is_never_trained_biases_the_lengths_but_not_at_the_end_of_a_lap() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["serial"], LONGER)
    lengths = lengths_of(outcome)
    settled = [n for index, of in lengths.items() if index <= 0.75 * 95 for n in of]
    late = lengths | {94: [10_000]}
    assert measured(outcome, probes=[Probe(0, 0.5, late)]).length_bias == pytest.approx(0.0)
    never = lengths | {-1: [10_000]}
    alone = (sum(settled) + 10_000) / (len(settled) + 1)
    bias = measured(outcome, probes=[Probe(0, 0.5, never)]).length_bias
    assert bias == pytest.approx(sum(settled) / len(settled) / alone - 1)


def test_a_lap_that_trained_none_of_the_probed_prompts_has_no_length_bias() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["serial"], LONGER)
    assert measured(outcome, probes=[Probe(0, 0.5, {10_000: [5]})]).length_bias is None


def test_the_time_to_the_target_is_interpolated_between_checkpoints() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["serial"], LONGER)
    ends = [event.time_s - outcome.of(RoundStarted)[0].time_s for event in outcome.of(RoundEnded)]
    probes = [Probe(0, 0.2, {}), Probe(3, 0.7, {}), Probe(6, 0.9, {})]
    expected = ends[2] + 0.5 * (ends[5] - ends[2])
    assert measured(outcome, probes=probes).time_to_reward_s == pytest.approx(expected)
    assert measured(outcome, probes=probes[:2]).time_to_reward_s is None
    assert measured(outcome, probes=[Probe(0, 0.85, {})]).time_to_reward_s == 0.0


def test_every_trained_group_is_counted_once_in_a_lap() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["rollpacker"], LONGER)
    meter = LapMeter(0)
    for event in outcome.events:
        meter.on(event)
    trained = [event for event in outcome.of(GroupEnded) if event.fate == "trained"]
    assert sum(report.num_groups for report in meter.rounds) == len(trained)
