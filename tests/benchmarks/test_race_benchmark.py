"""The race benchmark: who races, what its probes measure, what it prints."""

import pytest
from probe import LapLog, Probe, length_bias, time_to
from racers import ENTRIES

from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, Outcome, change, simulate
from race import interval, print_ratios, print_table, ratios
from tailrace.record.events import RoundEnded, RoundStarted
from tailrace.schedules import SCHEDULES

SERIAL = simulate(SCHEDULES_BY_NAME["serial"], change(SETTINGS, rounds=6))


def logged(outcome: Outcome) -> LapLog:
    log = LapLog()
    for event in outcome.events:
        log.on(event)
    return log


LOG = logged(SERIAL)


def test_every_schedule_races_with_parameters_that_work() -> None:
    assert {entry.schedule for entry in ENTRIES.values()} == set(SCHEDULES)
    for entry in ENTRIES.values():
        racer = entry.racer(seed=2)
        assert racer.config.run.seed == 2 and racer.config.run.rounds > entry.warm_up_rounds


def test_a_racer_s_overrides_reach_its_schedule() -> None:
    responses = ENTRIES["tailbatch_responses"].racer(0).schedule.keywords["response_speculation"]
    assert (responses, ENTRIES["tailbatch"].racer(0).schedule.keywords["response_speculation"]) == (1.25, 1.0)


def test_length_bias_is_against_uninterrupted_responses() -> None:
    lengths = dict(LOG.trained)
    halves = [{i: n for i, n in lengths.items() if (i < 48) == early} for early in (True, False)]
    probes = [Probe(0, 0.5, halves[0]), Probe(3, 0.6, halves[1]), Probe(6, 0.7, {})]
    assert length_bias(LOG.trained, probes, 0) == pytest.approx(0.0)
    doubled = [Probe(0, 0.5, {index: [n * 2 for n in of] for index, of in lengths.items()})]
    assert length_bias(LOG.trained, doubled, 0) == pytest.approx(-0.5)


def test_a_prompt_that_is_never_trained_biases_the_lengths_but_not_at_the_end_of_a_lap() -> None:
    lengths = dict(LOG.trained)
    settled = [n for index, of in lengths.items() if index <= 0.75 * 95 for n in of]
    assert length_bias(LOG.trained, [Probe(0, 0.5, lengths | {94: [10_000]})], 0) == pytest.approx(0.0)
    alone = (sum(settled) + 10_000) / (len(settled) + 1)
    bias = length_bias(LOG.trained, [Probe(0, 0.5, lengths | {-1: [10_000]})], 0)
    assert bias == pytest.approx(sum(settled) / len(settled) / alone - 1)


def test_a_lap_that_trained_none_of_the_probed_prompts_has_no_length_bias() -> None:
    assert length_bias(LOG.trained, [Probe(0, 0.5, {10_000: [5]})], 0) is None
    assert length_bias(LOG.trained, [Probe(2, 0.5, dict(LOG.trained))], warm_up_rounds=3) is None


def test_the_time_to_the_target_is_interpolated_between_checkpoints() -> None:
    start_s = SERIAL.of(RoundStarted)[0].time_s
    ends = [event.time_s - start_s for event in SERIAL.of(RoundEnded)]
    probes = [Probe(0, 0.2, {}), Probe(3, 0.7, {}), Probe(6, 0.9, {})]
    assert time_to(0.8, probes, LOG.ends_s) == pytest.approx(ends[2] + 0.5 * (ends[5] - ends[2]))
    assert time_to(0.8, probes[:2], LOG.ends_s) is None
    assert time_to(0.8, [Probe(0, 0.85, {})], LOG.ends_s) == 0.0


def test_ratios_are_of_the_same_seed() -> None:
    assert ratios([{"x": 2.0}, {"x": 9.0}], [{"x": 1.0}, {"x": 3.0}], "x") == [2.0, 3.0]


def test_an_interval_is_student_s_over_the_seeds() -> None:
    assert interval([2.0]) == "2.00"
    assert interval([1.0, 2.0, 3.0]) == "2.00 +- 2.48"


def test_the_report_has_a_line_a_schedule_and_a_ratio_for_each_pair(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = ("reward", "tokens_per_s", "staleness_max", "lag_mean", "lag_max")
    figures += ("ess_mean", "carried_tokens", "carried_samples", "waste_share", "length_bias")
    lap = dict.fromkeys(figures, 0.5) | {"samples_per_s": 2.0, "rollout_tokens_per_s": 4.0}
    lap |= {"time_to_reward_s": 3.0}
    faster = lap | {"samples_per_s": 3.0, "rollout_tokens_per_s": 5.0}
    laps = {"serial": [lap], "april": [faster], "tailrace": [faster]}
    print_table(laps)
    print_ratios(laps)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["serial", "april", "tailrace"]
    assert [line.split()[-1] for line in lines[4:]] == ["1.25", "1.50", "1.00"]
