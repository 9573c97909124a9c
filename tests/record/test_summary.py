"""What a run comes to, from a story by hand, and the figures of a trial, from schedules in virtual time."""

import dataclasses
import json
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from helpers.record_story import Collector, Story, pipelined_round, play
from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, Outcome, change, simulate
from tailrace.record.bounds import RoundBound
from tailrace.record.events import (
    Evaluated,
    Event,
    GroupEnded,
    RoundEnded,
    RoundStarted,
    Row,
    RowSkipped,
    SampleScored,
    Stepped,
    TokensWasted,
)
from tailrace.record.figures import summed
from tailrace.record.metrics import MetricsWriter, read_rows
from tailrace.record.rewind import rewind_records
from tailrace.record.steps import StepMeter
from tailrace.record.summary import (
    BoundSummary,
    FirstLast,
    GroupCounts,
    RunSummary,
    Summary,
    TokenCounts,
)
from tailrace.schedules import SCHEDULES
from tailrace.types import SampleId


def told() -> Story:
    story, lost = Story(), SampleId(9, 0, 0)
    story.tell(Evaluated(9.0, 0, 8, reward=0.25, mean_tokens=5.0, solved=0.125))
    pipelined_round(story)
    story.tell(
        Evaluated(30.0, 1, 8, reward=0.75, mean_tokens=5.0, solved=0.5),
        SampleScored(12.0, lost, None, "timeout", 5),
        TokensWasted(12.0, lost, 5, "no reward"),
        GroupEnded(12.0, 9, "dropped", "no reward"),
        GroupEnded(13.0, 8, "filtered", "zero variance"),
        RowSkipped(13.0, 7, "no prompt"),
    )
    return story


EXPECTED = RunSummary(
    eval=FirstLast(0.25, 0.75),
    solved=FirstLast(0.125, 0.5),
    reward=FirstLast(0.75, 0.75),
    rounds=1,
    steps=2,
    groups=GroupCounts(
        trained=2,
        filtered=1,
        dropped=1,
        reasons={"filtered/zero_variance": 1, "dropped/no_reward": 1},
        parked=0,
    ),
    tokens=TokenCounts(generated=40, trained=40, masked=0, parked=0, drafted=0, wasted={"no_reward": 5}),
    failures={"timeout": 1},
    rows_skipped={"no_prompt": 1},
    ages=dict(
        staleness_mean=0.0,
        staleness_max=0.0,
        lag_mean=0.0,
        lag_max=0.0,
        carried_tokens=0.0,
        versions_max=1.0,
        deferrals_max=0.0,
        rounds_max=0.0,
    ),
    mismatch_kl=0.01,
    round=dict(
        main_time_s=14.0,
        rollout_time_s=10.0,
        first_dispatch_s=4.0,
        trainer_compute_s=6.0,
        wait_s=8.0,
        waiting_ratio=8 / 14,
        start_ratio=4 / 14,
        publish_s=1.0,
        generated_tokens_per_s=4.0,
    ),
    bound=BoundSummary(
        bound_s=pytest.approx(9.0),
        share=pytest.approx(9 / 14),
        run_share=pytest.approx(8.5 / 14),
        run_time_s=14.0,
        worst="round 1 took 14.0 s, 9.0 s would do for its longest response; "
        "the trainer waited 4.0 s for sample 0.0/1 on engine-0",
    ),
    bias=dict(length=pytest.approx(10 / 10.4 - 1), reward=0.0, delay=0.0),
    ettr=1.0,  # the wall clock of the story stands still
)


def test_a_run_is_added_up() -> None:
    play(told().events, summary := Summary())
    assert summary.summary() == EXPECTED


def test_the_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "out" / "summary.json"
    play(told().events, Summary(path))
    written = json.loads(path.read_text())
    assert written["eval"] == {"first": 0.25, "last": 0.75}
    assert written["groups"]["trained"] == 2
    assert written["tokens"] == {
        "generated": 40,
        "trained": 40,
        "masked": 0,
        "parked": 0,
        "drafted": 0,
        "wasted": {"no_reward": 5},
    }
    assert written["round"]["waiting_ratio"] == 8 / 14


def test_a_resumed_run_counts_its_earlier_life(tmp_path: Path) -> None:
    whole = told()
    pipelined_round(whole, round=1, start_s=100.0)
    play(whole.events, expected := Summary())

    path = tmp_path / "metrics.jsonl"
    play(whole.events, MetricsWriter(path))  # killed after round 1, whose checkpoint was never written
    again = Story(num_steps=2)
    again.tell(Evaluated(30.0, 1, 8, reward=0.75, mean_tokens=5.0, solved=0.5))
    pipelined_round(again, round=1, start_s=100.0)
    rewind_records(path, tmp_path, round=1, step=2)
    earlier = read_rows(path)
    play(again.events, resumed := Summary(earlier=earlier), earlier=earlier)
    of_a_process = {"bound": None, "bias": {}}
    assert replace(resumed.summary(), **of_a_process) == replace(expected.summary(), **of_a_process)


def test_a_resumed_run_has_the_bounds_of_all_rounds_and_the_words_of_its_last_process(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    play(pipelined_round().events, MetricsWriter(path))
    play(pipelined_round(round=1, start_s=0.0).events, resumed := Summary(earlier=read_rows(path)))
    bound = resumed.summary().bound
    assert bound and bound.worst.startswith("round 2 took 14.0 s, 9.0 s would do")
    assert (bound.bound_s, bound.run_share) == pytest.approx((9.0, 8.5 / 14))


def test_a_run_that_did_nothing_has_nothing_to_say() -> None:
    play([], summary := Summary())
    result = summary.summary()
    assert (result.eval, result.reward, result.rounds, result.steps) == (None, None, 0, 0)
    assert result.round["main_time_s"] is None


def test_a_long_run_is_kept_in_little_more_than_its_numbers() -> None:
    play(told().events, collector := Collector())
    summary, num_values = Summary(), 0
    tracemalloc.start()
    for number in range(1, 501):
        for row in collector.rows:
            num_values += len(row)
            summary.on({name: value + 0.1 * number for name, value in row.items()})
        summary.on(RoundBound(1.0, f"round {number}", 1.0, 1.0))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 10 * num_values
    assert summary.rows[-1] == {name: value + 50.0 for name, value in collector.rows[-1].items()}


LONGER = change(SETTINGS, rounds=6)
MAX_TOKENS = 6000


def measured(outcome: Outcome, warm_up_rounds: int = 0) -> Row:
    summary = Summary()
    steps = StepMeter(summary, wall_clock=lambda: 0.0)
    for event in outcome.events:
        steps.on(event)
    steps.close()
    return summary.figures(warm_up_rounds)


def test_throughput_counts_the_samples_of_the_counted_rounds_over_their_whole_time() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["serial"], LONGER)
    start, end = outcome.of(RoundStarted)[2].time_s, outcome.of(RoundEnded)[-1].time_s
    figures = measured(outcome, warm_up_rounds=2)
    assert figures["samples_per_s"] == pytest.approx(4 * 16 * 4 / (end - start))
    trained = [sample for step in outcome.of(Stepped) if step.end_s > start for sample in step.samples]
    assert figures["tokens_per_s"] == pytest.approx(sum(s.num_tokens for s in trained) / (end - start))
    assert figures["main_s_per_1000_samples"] == pytest.approx(1000 * figures["main_time_s"] / (16 * 4))


def test_lengths_are_those_of_the_trained_samples() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["serial"], LONGER)
    lengths = [sample.num_tokens for step in outcome.of(Stepped) for sample in step.samples]
    figures = measured(outcome)
    assert figures["length_mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert figures["length_max"] == max(lengths) == MAX_TOKENS
    assert figures["truncated_share"] == lengths.count(MAX_TOKENS) / len(lengths) > 0


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
    figures = measured(simulate(conventional, LONGER))
    assert (figures["lag_max"], figures["staleness_max"]) == (3, 0)
    assert 1.0 < figures["lag_mean"] < 2.0
    assert figures["carried_tokens"] == figures["carried_samples"] == 0.0


def test_april_carries_tokens_over_and_wastes_none() -> None:
    outcome = simulate(SCHEDULES_BY_NAME["april"], LONGER)
    figures = measured(outcome)
    old = sum(n for step in outcome.of(Stepped) for age, n in step.lags.publications.items() if age)
    assert figures["carried_tokens"] == pytest.approx(old / outcome.totals.trained_tokens)
    assert 0 < figures["carried_tokens"] < 1 and figures["waste_share"] == 0.0
    assert figures["deferrals_max"] > 0 and figures["staleness_max"] > 0


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
