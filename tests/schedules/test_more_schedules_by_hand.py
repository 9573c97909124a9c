"""More schedules in the world of test_schedules_by_hand.py: one token is one second, one trained position is
one second, all else takes no time. Groups have two samples, unless a test says otherwise."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from helpers.virtual import EXACT, ZERO_VARIANCE, Outcome, change, simulate, worlds
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.record.events import Accumulated, BooksClosed, GroupReady, Published, RequestStarted, Stepped
from tailrace.schedules import SCHEDULES
from tailrace.schedules.april import april, april_dapo
from tailrace.schedules.bubblespec import bubblespec
from tailrace.schedules.conventional import conventional
from tailrace.schedules.one_step_off import one_step_off
from tailrace.schedules.rolloutpipe import periodic_asynchrony
from tailrace.schedules.seer import seer
from tailrace.schedules.serial import serial
from tailrace.schedules.sortedrl import sortedrl, sortedrl_on_policy
from tailrace.schedules.streamrl import streamrl, streamrl_async
from tailrace.schedules.tailbatch import tailbatch_async, tailbatch_dapo
from tailrace.schedules.tailrace import tailrace_on_policy
from tailrace.schedules.windowed_fifo import windowed_fifo
from tailrace.types import Sample, Span

TWO_ROUNDS = RunSettings(rounds=2, group_size=2)


def run(schedule, lengths: dict[int, int], rounds: int = 2, slots: int = 1000) -> Outcome:  # type: ignore[no-untyped-def]
    """Responses have the length of their prompt in the table, else 10 tokens."""
    sim = change(EXACT, engines=change(EXACT.engines, slots=slots))
    parts = worlds(sim, lambda sample: lengths.get(sample.prompt.index, 10))
    return simulate(schedule, change(TWO_ROUNDS, rounds=rounds), sim, parts=parts)


def ready(outcome: Outcome) -> dict[int, float]:
    return {event.prompt: event.time_s for event in outcome.of(GroupReady)}


def worked(outcome: Outcome) -> list[tuple[float, float]]:
    return [(event.start_s, event.end_s) for event in outcome.of(Accumulated)]


def published(outcome: Outcome) -> list[float]:
    return [event.end_s for event in outcome.of(Published)]


def started(outcome: Outcome) -> list[tuple[float, int, int]]:
    """Time, prompt and tokens of the first sample's requests."""
    firsts = [event for event in outcome.of(RequestStarted) if event.sample.number == 0]
    return [(event.time_s, event.sample.prompt, event.num_tokens) for event in firsts]


def spans(outcome: Outcome, prompt: int) -> list[Span]:
    samples = [sample for step in outcome.of(Stepped) for sample in step.samples]
    return next(sample.spans for sample in samples if sample.prompt.index == prompt)


def test_conventional_makes_its_steps_after_the_last_response() -> None:
    """Two groups end at 10 s. Four samples of 11 positions are two batches of 22 s each."""
    outcome = run(partial(conventional, groups_per_step=1, steps_per_round=2), {}, rounds=1)
    assert worked(outcome) == [(10, 32), (32, 54)]
    assert published(outcome) == [54]


def test_april_with_a_bound_waits_for_the_group_that_is_due() -> None:
    """Group 1 ends at 10 s; group 0 is parked with 10 of 100 tokens. Published at 10 + 22 = 32 s. Group 2
    ends at 42 s, but group 0 may not be older than one publication: it ends at 32 + 90 = 122 s and trains
    202 s."""
    schedule = partial(april, groups_per_round=1, groups_launched=2, staleness=1)
    outcome = run(schedule, {0: 100})
    assert ready(outcome) == {1: 10, 2: 42, 0: 122}
    assert worked(outcome) == [(10, 32), (122, 324)]
    assert outcome.trained == [1, 0]


class AllEqualForPrompt0:
    """Rewards: the responses to prompt 0 are equal, so it is filtered."""

    async def score(self, sample: Sample) -> float:
        return float(sample.id.number if sample.prompt.index else 1)


def test_april_dapo_draws_a_batch_for_a_filtered_group_and_resumes_what_is_left_over_first() -> None:
    """Prompt i has responses of 10 (i + 1) tokens. At 10 s prompt 0 is filtered, one of two groups is alive,
    and prompts 2 and 3 start. Prompt 1 passes at 20 s and prompt 2 at 40 s, which ends the rollout; they
    train 2 * 21 + 2 * 31 s. At 144 s prompt 3, which lacks 10 tokens, and prompt 4 start."""

    def parts() -> RunComponents:
        made = worlds(EXACT, lambda sample: 10 * (sample.prompt.index + 1))()
        return replace(made, rewards=AllEqualForPrompt0())

    schedule = partial(april_dapo, groups_per_round=2, groups_per_draw=2)
    outcome = simulate(schedule, TWO_ROUNDS, EXACT, parts=parts, algorithm=ZERO_VARIANCE)
    assert started(outcome) == [(0, 0, 0), (0, 1, 0), (10, 2, 0), (10, 3, 0), (144, 3, 30), (144, 4, 0)]
    assert outcome.trained == [1, 2, 3, 4]
    assert spans(outcome, 3) == [Span(0, 30), Span(1, 10)]
    assert outcome.totals.wasted_tokens == {"zero variance": 20}


def test_tailbatch_dapo_draws_prompts_until_enough_groups_are_scored() -> None:
    """Four requests are in service. At 10 s group 0 ends, group 2 takes its slots, and the round is over.
    Round 1, from 32 s, is long: group 1 starts again, ends at 72 s and trains 82 s. Group 2 has the long
    round after the last: from 154 to 164 s, trained at 186 s."""
    schedule = partial(tailbatch_dapo, groups_per_round=1, requests_per_engine=4, response_speculation=1.0)
    outcome = run(schedule, {1: 40})
    assert ready(outcome) == {0: 10, 1: 72, 2: 164}
    assert published(outcome) == [32, 154, 186]
    assert outcome.totals.wasted_tokens == {"deferred": 20}


def test_tailbatch_async_goes_on_from_the_tokens_of_the_race() -> None:
    """Group 1 is parked with 10 of 40 tokens at 10 s, goes on at 32 s, ends at 62 s and trains 82 s."""
    schedule = partial(tailbatch_async, groups_per_round=1, prompt_speculation=2.0, response_speculation=1.0)
    outcome = run(schedule, {1: 40})
    assert started(outcome) == [(0, 0, 0), (0, 1, 0), (32, 1, 10)]
    assert published(outcome) == [32, 144]
    assert spans(outcome, 1) == [Span(0, 10), Span(1, 30)]


def test_tailrace_on_policy_races_the_losers_again_after_what_is_not_known_to_be_long() -> None:
    """Three prompts, races of two for one place. Group 1 wins at 10 s and trains 22 s. Group 0 has lost with
    10 tokens, so group 2 comes before it. It wins at 52 s and trains 42 s; group 0 loses 20 tokens, ends at
    134 s and trains 82 s."""
    schedule = partial(tailrace_on_policy, groups_per_round=1, prompt_speculation=2.0, rounds_sorted=3)
    outcome = run(schedule, {0: 40, 2: 20}, rounds=3)
    assert started(outcome) == [(0, 0, 0), (0, 1, 0), (32, 2, 0), (32, 0, 0), (94, 0, 0)]
    assert published(outcome) == [32, 94, 216]
    assert outcome.totals.wasted_tokens == {"deferred": 2 * (10 + 20)}


def test_its_races_go_on_until_the_winners_are_scored() -> None:
    """Rewards take 5 s. Group 0 is generated at 10 s and wins at 15 s, when group 1 lacks only rewards."""
    sim = change(EXACT, rewards=change(EXACT.rewards, median_s=5.0, sigma=0.0))
    parts = worlds(sim, lambda sample: 12 if sample.prompt.index == 1 else 10)
    schedule = partial(tailrace_on_policy, groups_per_round=1, prompt_speculation=2.0, rounds_sorted=2)
    outcome = simulate(schedule, TWO_ROUNDS, sim, parts=parts)
    assert started(outcome) == [(0, 0, 0), (0, 1, 0), (15 + 22, 1, 0)]
    assert published(outcome) == [37, 37 + 12 + 5 + 26]
    assert outcome.totals.wasted_tokens == {"deferred": 2 * 12}


def test_one_step_off_publishes_when_the_batch_is_trained_and_the_next_is_generated() -> None:
    """Batch 0 ends at 10 s and trains until 32 s; batch 1 is generated from 10 to 40 s. Published at 40 s.
    Batch 1 trains 62 s, until 102 s; batch 2 has ended at 50 s."""
    outcome = run(partial(one_step_off, groups_per_round=1, groups_per_step=1), {1: 30})
    assert started(outcome) == [(0, 0, 0), (10, 1, 0), (40, 2, 0)]
    assert worked(outcome) == [(10, 32), (40, 102)]
    assert published(outcome) == [40, 102]
    assert [step.lags.publications for step in outcome.of(Stepped)] == [{0: 20}, {1: 60}]


def test_periodic_asynchrony_trains_in_the_order_of_completion_and_steps_once() -> None:
    """Slots for one group: they end at 10 and 20 s. Each trains 22 s."""
    outcome = run(partial(periodic_asynchrony, groups_per_round=2), {}, rounds=1, slots=2)
    assert worked(outcome) == [(10, 32), (32, 54)]
    assert [step.end_s for step in outcome.of(Stepped)] == published(outcome) == [54]


def test_streamrl_starts_the_row_that_was_longest_in_the_last_epoch() -> None:
    """Two rows of 10 and 30 tokens, slots for one group. The seed draws the short row first in both epochs.
    Epoch 0: they end at 10 and 40 s and train 22 s and 62 s: published at 102 s. Epoch 1: the long row runs
    from 102 to 132 s, the short one until 142 s; trained from 132 to 194 and to 216 s."""
    sim = change(
        EXACT,
        engines=change(EXACT.engines, slots=2),
        lengths=change(EXACT.lengths, rows=2),
    )
    parts = worlds(sim, lambda sample: 30 if sample.prompt.row_number == 1 else 10)
    outcome = simulate(partial(streamrl, groups_per_round=2), TWO_ROUNDS, sim, parts=parts)
    assert [time_s for time_s, _, _ in started(outcome)] == [0, 10, 102, 132]
    assert worked(outcome) == [(10, 32), (40, 102), (132, 194), (194, 216)]
    assert published(outcome) == [102, 216]


def test_streamrl_async_starts_the_next_batch_when_the_last_one_is_complete() -> None:
    """Batch 0 ends at 10 s and trains until 32 s; then the new weights reach batch 1, which has 22 of 30
    tokens. It ends at 40 s and trains 62 s."""
    outcome = run(partial(streamrl_async, groups_per_round=1), {1: 30})
    assert started(outcome) == [(0, 0, 0), (10, 1, 0), (40, 2, 0)]
    assert worked(outcome) == [(10, 32), (40, 102)]
    assert published(outcome) == [32, 102]
    assert spans(outcome, 1) == [Span(0, 22), Span(1, 8)]


def test_seer_serves_a_probe_of_each_group_and_then_the_longest() -> None:
    """Three slots, groups of 10, 11, 12 and 40 tokens. At 10 s the probe of 0 ends and that of 3 starts. At
    11 s the lengths of 2 and 3 are unknown, so the other sample of 2 starts; at 12 s that of 3; at 23 s that
    of 1, and at 34 s that of 0. The rollout ends at 12 + 40 s. First come, first served, the samples of 3
    start at 21 and 22 s. 154 positions are trained."""
    lengths = {1: 11, 2: 12, 3: 40}
    outcome = run(partial(seer, groups_per_round=4, groups_per_step=4), lengths, rounds=1, slots=3)
    order = [(e.time_s, e.sample.prompt, e.sample.number) for e in outcome.of(RequestStarted)]
    assert order == [
        (0, 0, 0), (0, 1, 0), (0, 2, 0), (10, 3, 0), (11, 2, 1), (12, 3, 1), (23, 1, 1), (34, 0, 1),
    ]  # fmt: skip
    assert ready(outcome) == {0: 44, 1: 34, 2: 23, 3: 52}
    assert worked(outcome) == [(52, 206)]
    fifo = run(partial(serial, groups_per_round=4, groups_per_step=4), lengths, rounds=1, slots=3)
    assert worked(fifo) == [(62, 216)]


def test_sortedrl_trains_the_shortest_group_first_and_continues_the_other() -> None:
    """Group 1 ends at 10 s; group 0 is parked with 10 of 30 tokens, goes on at 32 s, ends at 52 s and trains
    62 s. No prompt is drawn in between."""
    outcome = run(partial(sortedrl, groups_per_round=2, groups_per_step=1), {0: 30})
    assert started(outcome) == [(0, 0, 0), (0, 1, 0), (32, 0, 10)]
    assert published(outcome) == [32, 114]
    assert spans(outcome, 0) == [Span(0, 10), Span(1, 20)]


def test_sortedrl_on_policy_starts_the_other_again() -> None:
    """As above, but group 0 starts again at 32 s, ends at 62 s and trains 62 s."""
    outcome = run(partial(sortedrl_on_policy, groups_per_round=2, groups_per_step=1), {0: 30})
    assert started(outcome) == [(0, 0, 0), (0, 1, 0), (32, 0, 0)]
    assert published(outcome) == [32, 124]
    assert outcome.totals.wasted_tokens == {"deferred": 20}


def test_bubblespec_drafts_the_next_group_in_free_slots_and_trains_what_the_next_weights_draw_again() -> None:
    """Group 1 has 10 tokens at 10 s; with two slots it starts when group 0 ends at 30 s, and has them at
    40 s, while group 0 trains 62 s. No token changes, so group 1 is ready when version 1 is published."""
    for slots, at_s in ((4, 0), (2, 30)):
        outcome = run(partial(bubblespec, groups_per_round=1, groups_per_step=1), {0: 30}, slots=slots)
        assert started(outcome)[:3] == [(0, 0, 0), (at_s, 1, 0), (92, 1, 10)]
        assert ready(outcome) == {0: 30, 1: 92}
        assert published(outcome) == [92, 114]
        assert spans(outcome, 1) == [Span(1, 10)]
        assert outcome.of(BooksClosed) == [BooksClosed(114, 1, 0, num_drafted_tokens=20)]


def test_windowed_fifo_does_not_take_a_group_beyond_the_window() -> None:
    """Three active groups, a window of two. Group 1 ends at 10 s and trains until 32 s. Group 2 has ended at
    20 s, but the window begins at group 0, which ends at 50 s and trains 102 s. Then the window begins at
    group 2, which trains 42 s; group 3 ended later than it, at 42 s."""
    schedule = partial(windowed_fifo, groups_per_step=1, groups_in_flight=3, window=2)
    outcome = run(schedule, {0: 50, 2: 20}, rounds=3)
    assert ready(outcome).items() >= {1: 10, 2: 20, 3: 42, 0: 50}.items()
    assert worked(outcome) == [(10, 32), (50, 152), (152, 194)]
    assert outcome.trained == [1, 0, 2]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_a_case_by_hand(name: str) -> None:
    texts = [file.read_text() for file in Path(__file__).parent.glob("test_*_by_hand.py")]
    assert any(re.search(rf"partial\(\s*{name},", text) or f"[{name}" in text for text in texts)
