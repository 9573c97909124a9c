"""Schedules in a world whose times can be computed by hand: exact moments, exact counts.

One token is one second, whatever runs beside it; a trained position (one prompt token and the completion, of
each sample) is one second; all else takes no time.
"""

from dataclasses import replace
from functools import partial
from math import exp, inf, nan

import pytest

from helpers.virtual import EXACT, change, simulate, worlds
from tailrace.controller.base import RunSettings
from tailrace.controller.run import Run
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.errors import RewardFailed
from tailrace.record.events import (
    Accumulated,
    EssTaken,
    GroupEnded,
    GroupReady,
    Published,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    Stepped,
    TokensWasted,
)
from tailrace.rollout.admission import Frontier, FrontierFirst
from tailrace.schedules.april import april
from tailrace.schedules.conventional import conventional
from tailrace.schedules.pipelinerl import pipelinerl
from tailrace.schedules.rolloutpipe import rolloutpipe, rolloutpipe_eager
from tailrace.schedules.serial import serial
from tailrace.schedules.tailbatch import rollpacker, tailbatch
from tailrace.schedules.tailrace import tailrace, tailrace_on_policy
from tailrace.types import KV, Sample, SampleId, Span

PAIRS = RunSettings(rounds=1, group_size=2)
ONE_BY_ONE = change(EXACT, engines=change(EXACT.engines, slots=2))
"""Room for one group: they complete at 10, 20, 30, ... s. Training one takes 2 * (1 + 10) = 22 s."""


def times(outcome) -> tuple[list[float], list[tuple[float, float]], float]:  # type: ignore[no-untyped-def]
    """When groups were ready, when the trainer worked, and when the round was over."""
    ready = [event.time_s for event in outcome.of(GroupReady)]
    worked = [(event.start_s, event.end_s) for event in outcome.of(Accumulated)]
    return ready, worked, outcome.of(RoundEnded)[0].time_s


def test_serial_trains_after_the_last_response() -> None:
    outcome = simulate(partial(serial, groups_per_round=3, groups_per_step=1), PAIRS, ONE_BY_ONE)
    assert times(outcome) == ([10, 20, 30], [(30, 52), (52, 74), (74, 96)], 96)


def test_rolloutpipe_trains_from_the_first_complete_group_on() -> None:
    outcome = simulate(partial(rolloutpipe, groups_per_round=3, groups_per_step=1), PAIRS, ONE_BY_ONE)
    assert times(outcome) == ([10, 20, 30], [(10, 32), (32, 54), (54, 76)], 76)


def test_a_step_waits_for_its_u_groups_and_the_publication_for_all_r() -> None:
    outcome = simulate(partial(rolloutpipe, groups_per_round=4, groups_per_step=2), PAIRS, ONE_BY_ONE)
    assert times(outcome) == ([10, 20, 30, 40], [(20, 64), (64, 108)], 108)
    assert [step.end_s for step in outcome.of(Stepped)] == [64, 108]
    assert [event.end_s for event in outcome.of(Published)] == [108]


def test_eager_accumulates_at_once_and_steps_at_the_same_groups() -> None:
    outcome = simulate(partial(rolloutpipe_eager, groups_per_round=4, groups_per_step=2), PAIRS, ONE_BY_ONE)
    assert times(outcome) == ([10, 20, 30, 40], [(10, 32), (32, 54), (54, 98)], 98)
    assert [[id.prompt for id in step.stats.samples[::2]] for step in outcome.of(Stepped)] == [[0, 1], [2, 3]]


def test_groups_travel_in_feasible_batches_within_one_step() -> None:
    """22 positions a group: two fit into 44 tokens, one into 43."""
    for tokens, worked in [(44, [(40, 84), (84, 128)]), (43, [(40, 62), (62, 84), (84, 106), (106, 128)])]:
        outcome = simulate(
            partial(rolloutpipe, groups_per_round=4, groups_per_step=4, max_tokens_per_batch=tokens),
            PAIRS,
            ONE_BY_ONE,
        )
        assert times(outcome)[1] == worked
        assert [step.end_s for step in outcome.of(Stepped)] == [128]


def test_a_round_of_the_papers_size_to_the_second() -> None:
    """R = 96, K = 8, U = 2: group g ends at g + 1 s, and a pair trains for a 32nd of its positions."""
    sim = change(EXACT, trainer=change(EXACT.trainer, tokens_per_s=256.0))
    parts = worlds(sim, lambda sample: sample.prompt.index + 1)
    outcome = simulate(
        partial(rolloutpipe, groups_per_round=96, groups_per_step=2),
        RunSettings(rounds=1, group_size=8),
        sim,
        parts=parts,
    )
    end_s, expected = 0.0, []
    for second in range(1, 96, 2):
        complete_s = second + 1.0
        start_s = max(end_s, complete_s)
        end_s = start_s + 8 * ((second + 1) + (second + 2)) / 256
        expected.append((start_s, end_s))
    assert times(outcome) == ([float(g + 1) for g in range(96)], expected, end_s)
    assert end_s == 165.03125
    assert len(outcome.of(RequestStarted)) == 768 and len(outcome.of(Stepped)) == 48
    assert [(event.end_s, event.version) for event in outcome.of(Published)] == [(end_s, 1)]


UNEQUAL = {(0, 0): 10, (0, 1): 20, (1, 0): 5, (1, 1): 5}


def unequal(sample: Sample) -> int:
    return UNEQUAL[sample.id.prompt, sample.id.number]


@pytest.mark.parametrize(
    ("admission", "started"),
    [
        (Frontier(groups=1), [(0, 0), (0, 0), (20, 1), (20, 1)]),
        (FrontierFirst(groups=1), [(0, 0), (0, 0), (10, 1), (15, 1)]),
        (Frontier(groups=2), [(0, 0), (0, 0), (0, 1), (0, 1)]),
    ],
)
def test_a_strict_frontier_holds_slots_free_that_frontier_first_fills(admission, started) -> None:  # type: ignore[no-untyped-def]
    schedule = partial(rolloutpipe, groups_per_round=2, groups_per_step=2, admission=admission)
    outcome = simulate(schedule, PAIRS, EXACT, parts=worlds(EXACT, unequal))
    assert [(event.time_s, event.sample.prompt) for event in outcome.of(RequestStarted)] == started


def test_serving_complete_frees_the_frontier_before_the_group_is_trainable() -> None:
    sim = change(EXACT, rewards=change(EXACT.rewards, median_s=5.0, sigma=0.0))
    schedule = partial(rolloutpipe, groups_per_round=2, groups_per_step=1, admission=Frontier(groups=1))
    outcome = simulate(schedule, PAIRS, sim)
    assert [event.time_s for event in outcome.of(RequestStarted)] == [0, 0, 10, 10]
    assert [event.time_s for event in outcome.of(GroupReady)] == [15, 25]


def test_april_goes_on_from_the_parked_tokens_and_records_both_versions() -> None:
    """Group 1 has 10 of its 20 tokens when group 0 is taken; v1 comes at 32 s; it ends at 42 s."""
    parts = worlds(EXACT, lambda sample: 20 if sample.prompt.index == 1 else 10)
    outcome = simulate(
        partial(april, groups_per_round=1, groups_launched=2), change(PAIRS, rounds=2), EXACT, parts=parts
    )
    first, second = outcome.of(Stepped)
    assert (first.start_s, second.start_s) == (32, 42 + 42)
    assert [sample.spans for sample in first.samples] == [[Span(0, 10)]] * 2
    assert [sample.spans for sample in second.samples] == [[Span(0, 10), Span(1, 10)]] * 2
    assert (first.lags.publications, second.lags.publications) == ({0: 20}, {0: 20, 1: 20})
    assert outcome.of(TokensWasted) == []


def test_tailbatch_races_short_rounds_and_restarts_what_lost_in_a_long_one() -> None:
    """P0 = 1 of 2 prompts, 3 samples each for K = 2: in round 0 prompt 1 loses and fills the long round 1."""
    lengths = {(0, 0): 4, (0, 1): 6, (0, 2): 9, (1, 0): 7, (1, 1): 7, (1, 2): 7}
    parts = worlds(EXACT, lambda sample: lengths[sample.id.prompt, sample.id.number])
    schedule = partial(tailbatch, groups_per_round=1, prompt_speculation=2.0, response_speculation=1.5)
    outcome = simulate(schedule, change(PAIRS, rounds=2), EXACT, parts=parts)
    assert outcome.trained == [0, 1]
    assert outcome.totals.wasted_tokens == {"raced": 6, "deferred": 18}  # at 6 s, the moment that decides
    assert [id.attempt for id in outcome.of(Stepped)[1].stats.samples] == [1, 1]
    assert [event.time_s for event in outcome.of(GroupReady)] == [6, 6 + 12 + 7]


def test_pipelinerl_publishes_into_running_sequences() -> None:
    """Two groups of 10 and 40 tokens in flight; the step on the first ends at 10 + 22 s."""
    parts = worlds(EXACT, lambda sample: 40 if sample.prompt.index == 1 else 10)
    schedule = partial(pipelinerl, groups_per_step=1, in_flight_per_engine=4, ring_groups=4)
    outcome = simulate(schedule, change(PAIRS, rounds=3), EXACT, parts=parts)
    long = next(s for step in outcome.of(Stepped) for s in step.samples if s.prompt.index == 1)
    assert outcome.of(Published)[0].end_s == 32
    assert long.spans == [Span(0, 32), Span(1, 8)]


def test_pipelinerl_s_guard_gives_up_what_is_stale_until_a_batch_is_fresh() -> None:
    """Three groups in flight. A look at 22 positions takes 22/3 s, training them 22 s: published at 39.3 s,
    when groups 1 to 4 have tokens of version 0. All four are ready and fill the ring at 60 s, when the guard
    has looked at group 1; what is drawn then is fresh."""
    parts = worlds(EXACT, lambda sample: {1: 30, 2: 31, 3: 30}.get(sample.prompt.index, 10))
    schedule = partial(
        pipelinerl, groups_per_step=1, in_flight_per_engine=6, ring_groups=1, ring_full="block", min_ess=0.99
    )
    outcome = simulate(schedule, change(PAIRS, rounds=2), EXACT, parts=parts)
    guard, ended = outcome.of(EssTaken), outcome.of(GroupEnded)
    assert [event.time_s for event in guard] == pytest.approx([10 + 22 / 3, 60])
    assert [event.ess for event in guard] == pytest.approx([1, exp(-0.25)])
    assert [(event.prompt, event.reason) for event in ended] == [
        (0, "trained"), (1, "low ess"), (2, "stale"), (3, "stale"), (4, "stale"), (5, "trained"),
    ]  # fmt: skip
    assert [event.end_s for event in outcome.of(Published)] == pytest.approx([10 + 22 / 3 + 22, 70 + 22])


def test_conventional_shuffles_the_samples_of_a_round_and_steps_g_times() -> None:
    sim = change(EXACT, trainer=change(EXACT.trainer, tokens_per_s=1e9))
    outcome = simulate(partial(conventional, groups_per_step=2, steps_per_round=3), PAIRS, sim)
    steps = [[sample.id for sample in step.samples] for step in outcome.of(Stepped)]
    assert [len(step) for step in steps] == [4, 4, 4] and len(outcome.of(Published)) == 1
    assert sorted(id for step in steps for id in step) == [
        SampleId(p, 0, k) for p in range(6) for k in (0, 1)
    ]
    assert any(len({id.prompt for id in step}) > 2 for step in steps)  # groups are torn apart


class RewardsOfFirstSamples:
    """Of each group but group 0 the second sample fails."""

    async def score(self, sample: Sample) -> float:
        if sample.id.prompt and sample.id.number:
            raise RewardFailed("down")
        return 1.0


def test_conventional_steps_g_times_also_if_samples_have_failed() -> None:
    """9 of 16 samples make 8 steps: of batches of ceil(9 / 8) = 2 there would be 5."""
    outcome = simulate(
        partial(conventional, groups_per_step=1, steps_per_round=8),
        PAIRS,
        parts=lambda: replace(simulated_parts(EXACT, seed=0), rewards=RewardsOfFirstSamples()),
    )
    assert sorted(len(step.samples) for step in outcome.of(Stepped)) == [1] * 7 + [2]
    assert len(outcome.of(Published)) == 1


def test_the_stream_trainer_accumulates_in_the_rollout_and_parks_at_the_last_group_of_the_race() -> None:
    """Groups 0 to 3 take 10, 20, 30, 40 s; the race is for two: the others are parked at 20 s, not at 32 s,
    when group 0 has been accumulated."""
    outcome = simulate(
        partial(rollpacker, groups_per_round=2, prompt_speculation=2.0, response_speculation=1.0),
        PAIRS,
        EXACT,
        parts=worlds(EXACT, lambda sample: 10 * (sample.prompt.index + 1)),
    )
    worked = [(event.start_s, event.end_s) for event in outcome.of(Accumulated)][:2]
    assert worked == [(10, 32), (32, 74)]
    deferred = [event for event in outcome.of(TokensWasted) if event.reason == "deferred"]
    assert {(event.sample.prompt, event.num_tokens) for event in deferred} == {(2, 20), (3, 20)}


def test_what_is_queued_after_the_last_round_is_flushed_on_policy() -> None:
    outcome = simulate(
        partial(tailbatch, groups_per_round=3, prompt_speculation=4 / 3, response_speculation=1.0),
        PAIRS,
        EXACT,
        parts=worlds(EXACT, lambda sample: 10 * (sample.prompt.index + 1)),
    )
    assert [sorted({s.prompt.index for s in step.samples}) for step in outcome.of(Stepped)] == [
        [0, 1, 2],
        [3],
    ]
    assert outcome.of(Stepped)[1].lags.publications == {0: 80}


def test_tailrace_refills_at_publish_and_never_stops() -> None:
    """One group of two is trained a round; the other goes on over the publication, not from its start."""
    outcome = simulate(
        partial(tailrace, groups_per_step=1, groups_in_flight=2, staleness=1),
        change(PAIRS, rounds=2),
        EXACT,
        parts=worlds(EXACT, lambda sample: {0: 10, 1: 40, 2: 100}[sample.prompt.index]),
    )
    started = [(event.time_s, event.sample.prompt) for event in outcome.of(RequestStarted)]
    assert started == [(0, 0), (0, 0), (0, 1), (0, 1), (32, 2), (32, 2)]
    assert outcome.trained == [0, 1]
    assert outcome.of(Stepped)[1].lags.publications == {1: 64, 0: 16}


def test_the_window_waits_for_the_group_that_falls_due() -> None:
    """Bound 1: group 0 of 100 s must be in the second round, though 1 and 2 are complete long before."""
    outcome = simulate(
        partial(tailrace, groups_per_step=1, groups_in_flight=2, staleness=1),
        change(PAIRS, rounds=3),
        EXACT,
        parts=worlds(EXACT, lambda sample: {0: 100, 1: 10, 2: 10, 3: 10}[sample.prompt.index]),
    )
    assert outcome.trained == [1, 0, 2]


def test_the_on_policy_form_trains_the_row_last_that_was_long_in_the_last_epoch() -> None:
    """Six rows, one of them long, and batches of one epoch: it is unknown in the first one."""
    sim = change(EXACT, lengths=change(EXACT.lengths, rows=6))
    outcome = simulate(
        partial(tailrace_on_policy, groups_per_round=2, prompt_speculation=1.0, rounds_sorted=3),
        change(PAIRS, rounds=9),
        sim,
        parts=worlds(sim, lambda sample: 50 if sample.prompt.row_number == 5 else 10),
    )
    rows = [sorted(s.prompt.row_number for s in step.samples[::2]) for step in outcome.of(Stepped)]
    assert [5 in pair for pair in rows[3:]] == [False, False, True] * 2
    assert outcome.totals.wasted_tokens == {} and outcome.run.parked.groups == []


# -- defaults as published -----------------------------------------------------------------------------


def test_serial_trains_groups_in_the_order_of_their_prompts_whatever_completes_first() -> None:
    parts = worlds(EXACT, lambda sample: {0: 30, 1: 20, 2: 10}[sample.prompt.index])
    schedule = partial(serial, groups_per_round=3, groups_per_step=1)
    outcome = simulate(schedule, PAIRS, EXACT, parts=parts)
    assert [event.prompt for event in outcome.of(GroupReady)] == [2, 1, 0]
    assert outcome.trained == [0, 1, 2]


def test_rolloutpipe_trains_groups_in_the_order_in_which_they_complete() -> None:
    parts = worlds(EXACT, lambda sample: {0: 30, 1: 20, 2: 10}[sample.prompt.index])
    schedule = partial(rolloutpipe, groups_per_round=3, groups_per_step=1)
    assert simulate(schedule, PAIRS, EXACT, parts=parts).trained == [2, 1, 0]


@pytest.mark.parametrize("schedule", [tailbatch, rollpacker])
def test_a_race_ends_when_responses_are_generated_and_not_when_they_are_scored(schedule) -> None:  # type: ignore[no-untyped-def]
    """Group 0 is generated at 10 s and scored at 15 s; group 1 is stopped at 10 s with 10 of 40 tokens."""
    sim = change(EXACT, rewards=change(EXACT.rewards, median_s=5.0, sigma=0.0))
    outcome = simulate(
        partial(schedule, groups_per_round=1, prompt_speculation=2.0, response_speculation=1.0),
        PAIRS,
        sim,
        parts=worlds(sim, lambda sample: 40 if sample.prompt.index == 1 else 10),
    )
    cancelled = [event for event in outcome.of(RequestEnded) if event.outcome == "cancelled"]
    assert [(event.time_s, event.sample.prompt, event.num_tokens) for event in cancelled] == [(10, 1, 10)] * 2
    assert outcome.of(GroupReady)[0].time_s == 15


@pytest.mark.parametrize(("kv", "num_prefilled"), [({}, 2 + 11 + 11), ({"kv": "keep"}, 2)])
def test_april_recomputes_the_cache_of_resumed_responses_unless_it_is_kept(
    kv: dict[str, str], num_prefilled: int
) -> None:
    """Two prompts of one token are computed once each; responses to prompt 1 are parked with 10 tokens."""
    parts = worlds(EXACT, lambda sample: 20 if sample.prompt.index == 1 else 10)
    schedule = partial(april, groups_per_round=1, groups_launched=2, **kv)
    outcome = simulate(schedule, change(PAIRS, rounds=2), EXACT, parts=parts)
    resumed = [event for event in outcome.of(RequestStarted) if event.num_tokens == 10]
    assert [event.sample.prompt for event in resumed] == [1, 1]
    drawn_later = outcome.totals.num_drawn - 2
    assert outcome.usages[0].num_prefilled == num_prefilled + drawn_later


@pytest.mark.parametrize(
    ("kv", "recomputed"),
    [
        (0.3, [2, 3, 4]),
        (0.375, [2, 3, 4]),
        (0.376, [3, 4]),
        (1.3, []),
        ("keep", []),
        ("recompute", [*range(5)]),
    ],
)
def test_the_cache_is_recomputed_when_the_drift_since_it_was_recomputed_reaches_the_number(
    kv: KV | float, recomputed: list[int]
) -> None:
    """Groups 0 to 4 are generated by version 0, and step r trains group r with a lag of r: the KL is
    (0.5 r)^2 / 2, and the drift gains 0, 0.125, 0.25, 0.375, 0.5. The pair of prompt 5 is in flight."""

    async def one_group_a_round(run: Run) -> None:
        run.declare(staleness=inf)
        run.pool.launch(run.prompts(6))
        async for _ in run.rounds():
            await run.train(await run.pool.take(1))
            await run.publish(kv=kv)

    parts = worlds(EXACT, lambda sample: 10_000 if sample.prompt.index == 5 else 10)
    outcome = simulate(one_group_a_round, change(PAIRS, rounds=5), EXACT, parts=parts)
    published = outcome.of(Published)
    assert [number for number, event in enumerate(published) if event.kv == "recompute"] == recomputed
    in_flight = sum(2 * (1 + int(published[number].end_s)) for number in recomputed)
    assert outcome.usages[0].num_prefilled == 6 + in_flight


def test_a_drift_that_is_not_a_number_recomputes_the_cache() -> None:
    async def on_policy(run: Run) -> None:
        run.declare(staleness=0)
        run._drift = nan
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            await run.train(await run.pool.take(1))
            await run.publish(kv=1.0)

    outcome = simulate(on_policy, change(PAIRS, rounds=2), EXACT)
    assert [event.kv for event in outcome.of(Published)] == ["recompute", "keep"]
