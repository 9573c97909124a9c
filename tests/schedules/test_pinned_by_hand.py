"""Schedules that serve several versions at a time, in the world of test_schedules_by_hand.py. Groups have two
samples; prompt 0 has 50 tokens, others 10, so a step takes 22 s, and that of prompt 0 takes 102 s."""

from functools import partial

import pytest

from helpers.virtual import EXACT, Outcome, change, simulate, worlds
from tailrace.controller.base import RunSettings
from tailrace.record.events import Published, RequestEnded, RequestStarted, Stepped
from tailrace.schedules.dora import dora
from tailrace.schedules.laminar import best_fit, laminar
from tailrace.schedules.trl_async import trl_async
from tailrace.schedules.windowed_fifo import tinker_async
from tailrace.types import Sample, Span

SMALL = {"groups_per_step": 1, "groups_in_flight": 2, "staleness": 1}


def run(  # type: ignore[no-untyped-def]
    schedule,
    engines: int = 2,
    slots: int = 2,
    lengths: dict[int | tuple[int, int], int] = {0: 50},  # noqa: B006
    rounds: int = 3,
    group_size: int = 2,
    **of_engine: int,
) -> Outcome:
    """Responses have the length of their sample, or of their prompt, in the table, else 10 tokens."""
    sim = change(EXACT, engines=change(EXACT.engines, slots=slots, **{"versions": 1} | of_engine))

    def length_of(sample: Sample) -> int:
        prompt = sample.prompt.index
        return lengths.get((prompt, sample.id.number), lengths.get(prompt, 10))

    parts = worlds(sim, length_of, count=engines)
    return simulate(schedule, RunSettings(rounds=rounds, group_size=group_size), sim, parts=parts)


def requests(outcome: Outcome, prompt: int) -> list[tuple[float, int, str, int]]:
    """When, which sample, where and with how many tokens."""
    started = [event for event in outcome.of(RequestStarted) if event.sample.prompt == prompt]
    return [(event.time_s, event.sample.number, event.engine, event.num_tokens) for event in started]


def spans(outcome: Outcome) -> dict[int, list[Span]]:
    samples = [sample for step in outcome.of(Stepped) for sample in step.samples]
    return {sample.prompt.index: sample.spans for sample in samples}


def moved(outcome: Outcome) -> list[tuple[float, int, int]]:
    """When, and which sample."""
    ended = [event for event in outcome.of(RequestEnded) if event.outcome == "moved"]
    return [(event.time_s, event.sample.prompt, event.sample.number) for event in ended]


def published(outcome: Outcome) -> list[float]:
    return [event.end_s for event in outcome.of(Published)]


def test_dora_gives_an_older_version_its_share_of_the_engines() -> None:
    """Each engine has a sample of each group. Group 1 ends at 10 s: published at 32 s. Then version 0 has two
    requests, and group 2 comes with two: Round(2 * 2 / 4) = 1 engine. engine-1 loads version 1 and begins
    group 2, which ends at 42 s. But group 0 is due: it ends at 50 s, version 2 is published at 152 s."""
    outcome = run(partial(dora, **SMALL))
    assert requests(outcome, 0) == [
        (0, 0, "engine-0", 0), (0, 1, "engine-1", 0), (32, 1, "engine-0", 32),
    ]  # fmt: skip
    assert requests(outcome, 2) == [(32, 0, "engine-1", 0), (32, 1, "engine-1", 0)]
    assert requests(outcome, 3) == [(152, 0, "engine-0", 0), (152, 1, "engine-1", 0)]
    assert published(outcome) == [32, 152, 174]
    assert spans(outcome) == {1: [Span(0, 10)], 0: [Span(0, 50)], 2: [Span(1, 10)]}
    assert moved(outcome) == [(32, 0, 1)]
    assert sum(usage.num_prefilled for usage in outcome.usages) < 33, "its KV cache moved with it"


def test_dora_keeps_one_of_four_engines_for_a_quarter_of_the_requests() -> None:
    """Groups 1 to 3 end at 10 s and train 66 s. At 76 s version 0 has two requests, on engine-0 and engine-1,
    and three groups come: Round(4 * 2 / 8) = 1. engine-0 keeps its own request and gets the other. Group 6
    waits on the two engines that have version 1, until engine-1 opens with it."""
    schedule = partial(dora, groups_per_step=3, groups_in_flight=4, staleness=1, rebalance_s=1000.0)
    outcome = run(schedule, engines=4, lengths={0: 100}, rounds=2)
    assert requests(outcome, 0)[2:] == [(76, 1, "engine-0", 76)]
    assert [place for *place, _ in requests(outcome, 4)] == [[76, 0, "engine-2"], [76, 1, "engine-3"]]
    assert [place for *place, _ in requests(outcome, 6)] == [
        [76, 0, "engine-2"], [76, 1, "engine-3"], [77, 0, "engine-1"], [77, 1, "engine-1"],
    ]  # fmt: skip


def test_dora_leaves_an_older_version_the_engines_whose_caches_its_requests_need() -> None:
    """As in the first trace, one engine is the share of version 0 at 32 s. But its two requests have 33
    positions each, of 50 on an engine, and no engine goes back to version 0. Both stay until 50 s."""
    outcome = run(partial(dora, **SMALL), kv_tokens=50)
    assert requests(outcome, 0) == [(0, 0, "engine-0", 0), (0, 1, "engine-1", 0)]
    assert requests(outcome, 2) == [(50, 0, "engine-0", 0), (50, 1, "engine-1", 0)]
    assert published(outcome)[:2] == [32, 152]
    assert sum(usage.num_preempted for usage in outcome.usages) == 0


@pytest.mark.parametrize(("staleness", "began_s"), [(2, 40), (3, 21)])
def test_dora_fills_an_idle_slot_of_an_older_version_while_the_bound_allows(
    staleness: int, began_s: float
) -> None:
    """One engine of two slots, groups of one sample, of which the first has 40 tokens. At 21 s group 1 is
    trained, group 0 keeps the engine on version 0, and its other slot is idle. Groups 0 and 2 have version 0.
    With K = 4 versions group 3 may have it, too: three steps remain for the three. With K = 3 two remain, and
    it waits until the engine has loaded version 2, at 40 s."""
    schedule = partial(dora, groups_per_step=1, groups_in_flight=3, staleness=staleness, rebalance_s=1000.0)
    outcome = run(schedule, engines=1, lengths={0: 40}, rounds=4, group_size=1)
    assert published(outcome)[:2] == [21, 32]
    assert requests(outcome, 3) == [(began_s, 0, "engine-0", 0)]
    assert spans(outcome)[3] == [Span(2 if staleness == 2 else 0, 10)]


def test_dora_draws_prompts_for_the_idle_slots_of_an_older_version() -> None:
    """Two engines of four slots. At 54 s group 0 keeps two slots of engine-0, and groups 3 and 4 take version
    1 on engine-1. Group 5 comes for the two idle slots, on top of three groups in flight, since four can be
    trained in time. It has version 0."""
    schedule = partial(dora, groups_per_step=2, groups_in_flight=3, staleness=1, rebalance_s=1000.0)
    outcome = run(schedule, slots=4, lengths={0: 100}, rounds=2)
    assert published(outcome)[0] == 54
    assert requests(outcome, 4) == [(54, 0, "engine-1", 0), (54, 1, "engine-1", 0)]
    assert requests(outcome, 5) == [(54, 0, "engine-0", 0), (54, 1, "engine-0", 0)]
    assert spans(outcome)[5] == [Span(0, 10)]


def test_dora_draws_no_prompts_for_slots_whose_cache_is_full() -> None:
    """As in the trace before, but an engine has 120 positions, of which group 0 fills 110. Group 5 comes when
    it has ended."""
    schedule = partial(dora, groups_per_step=2, groups_in_flight=3, staleness=1, rebalance_s=1000.0)
    outcome = run(schedule, slots=4, lengths={0: 100}, rounds=2, kv_tokens=120)
    assert published(outcome)[0] == 54
    assert requests(outcome, 5) == [(65, 0, "engine-1", 0), (65, 1, "engine-1", 0)]
    assert sum(usage.num_preempted for usage in outcome.usages) == 1


@pytest.mark.parametrize(
    ("trigger", "divided_s"),
    [({}, []), ({"rebalance_s": 50.0}, [(50, 0, 1)]), ({"kv_pressure": 0.5}, [(57, 0, 1), (82, 4, 1)])],
)
def test_dora_divides_the_engines_on_a_timer_and_at_a_full_kv_cache(
    trigger: dict[str, float], divided_s: list[tuple[float, int, int]]
) -> None:
    """At 32 s version 0 keeps two of three engines for four requests, and version 1 gets one for groups 3, 4.
    Group 2 ends at 45 s. From then on one engine is the share of version 0: Round(3 * 2 / 6) = 1. The timer
    sees it at 50 s. engine-2 holds 4 * (t - 31) of 200 positions, more than half at 57 s. At 82 s it has no
    room for the last of its four requests, which moves to engine-1: that has version 1 and is idle."""
    words = {"groups_per_step": 1, "groups_in_flight": 3, "staleness": 3}
    words |= {"rebalance_s": 1000.0, "kv_pressure": 1.0}  # type: ignore[dict-item]
    lengths: dict[int | tuple[int, int], int] = {0: 100, 2: 45} | dict.fromkeys(range(3, 9), 60)
    schedule = partial(dora, **words | trigger)  # type: ignore[arg-type]
    outcome = run(schedule, engines=3, slots=4, lengths=lengths, rounds=2, kv_tokens=200)
    assert published(outcome) == [32, 137]
    assert moved(outcome) == [(32, 2, 1), *divided_s]


UNBOUNDED = {"groups_per_step": 1, "groups_in_flight": 3}


def test_laminar_empties_an_engine_whose_cache_shrinks_and_it_pulls() -> None:
    """Group 2 ends at 31 s, version 1 comes at 32 s. Each engine had 2 * 31 positions at 30 s and has 33 now,
    of group 0: it drains. engine-1 gets both requests, engine-0 pulls and begins group 3."""
    outcome = run(partial(laminar, **UNBOUNDED), slots=3, lengths={0: 80, 2: 31})
    assert moved(outcome) == [(32, 0, 0)]
    assert requests(outcome, 0)[-1] == (32, 0, "engine-1", 32)
    assert requests(outcome, 3) == [(32, 0, "engine-0", 0), (32, 1, "engine-0", 0)]
    assert spans(outcome) == {1: [Span(0, 10)], 2: [Span(0, 31)], 3: [Span(1, 10)]}


def test_laminar_lets_an_engine_whose_cache_grows_keep_its_requests() -> None:
    """At 32 s each engine has a sample of group 0 and one of group 2, which grow until 48 s. They have begun
    their three samples, so group 3 waits. At 50 s they have 51 positions after 2 * 46, and drain."""
    outcome = run(partial(laminar, **UNBOUNDED), slots=3, lengths={0: 80, 2: 48})
    assert published(outcome)[0] == 32
    assert moved(outcome) == [(50, 0, 0)]
    assert requests(outcome, 3)[0] == (50, 0, "engine-0", 0)


def test_laminar_begins_the_samples_of_a_batch_on_the_version_that_its_engine_has() -> None:
    """One engine of two slots, groups of one sample, steps of three: a batch is three samples. At 50 s the
    engine is empty, pulls version 1 and begins samples 9 and 10, of 30 and 60 tokens. Version 2 comes at 76.
    At 80 s sample 11 begins on version 1 all the same. It ends at 90 s, and sample 12 waits until the batch
    has ended, at 110 s, when the engine pulls version 3."""
    schedule = partial(laminar, groups_per_step=3, groups_in_flight=9, repack_s=1000.0)
    outcome = run(schedule, engines=1, slots=2, lengths={9: 30, 10: 60}, rounds=5, group_size=1)
    assert published(outcome)[:3] == [43, 76, 109]
    assert [requests(outcome, prompt)[0][0] for prompt in (9, 10, 11, 12)] == [50, 50, 80, 110]
    assert [spans(outcome)[prompt][0].version for prompt in (9, 10, 11, 12)] == [1, 1, 1, 3]


def test_laminar_has_no_bound_unless_it_is_given_one() -> None:
    """Groups 1 and 2 end at 10 s and are trained first, at 32 and 54 s. Group 0 ends at 100 s and is trained
    when version 2 is there. With a bound of one it would be due before version 2."""
    outcome = run(partial(laminar, **UNBOUNDED), slots=3, lengths={0: 100})
    assert outcome.trained == [1, 2, 0]
    assert [max(step.lags.publications) for step in outcome.of(Stepped)] == [0, 1, 2]
    assert run(partial(laminar, **SMALL), slots=3, lengths={0: 100}).trained == [1, 0, 2]


@pytest.mark.parametrize(
    ("loads", "emptied"),
    [
        ({"a": (0.2, 0.25), "b": (0.3, 0.25), "c": (0.7, 0.25)}, {"a": "c"}),
        ({"a": (0.2, 0.25), "b": (0.4, 0.25), "c": (0.9, 0.25)}, {"a": "b"}),
        ({"a": (0.1, 0.5), "b": (0.2, 0.75), "c": (0.3, 0.5)}, {"a": "c"}),
        ({"a": (0.1, 0.25), "b": (0.2, 0.25), "c": (0.7, 0.25)}, {"a": "c", "b": "c"}),
        ({"a": (0.6, 0.25), "b": (0.7, 0.25)}, {}),
    ],
)
def test_best_fit_takes_the_fullest_engine_on_which_cache_and_batch_fit(
    loads: dict[str, tuple[float, float]], emptied: dict[str, str]
) -> None:
    """First: 0.2 of a cache fit on 0.7, then 0.3 do not fit on 0.9. Second: 0.2 do not fit on 0.9. Third: a
    batch of 0.5 does not fit on 0.75. Fourth: 0.2 fit on 0.8, too. Last: 1.3 is more than a cache."""
    assert best_fit(loads) == emptied  # type: ignore[arg-type, comparison-overlap]


def test_tinker_async_trains_the_oldest_weights_first_and_discards_nothing() -> None:
    """Two groups are begun and not trained. Group 1 ends at 10 s and trains 22 s, group 2 ends at 42 s and
    trains until 64 s, when groups 0, of version 0, and 3 are in flight. Group 0 ended at 50 s. It is trained
    first, two publications old, and takes 102 s. No group is lost for it."""
    outcome = run(partial(tinker_async, groups_per_step=1, steps_off_policy=1), engines=1, slots=1000)
    assert outcome.trained == [1, 2, 0]
    assert published(outcome) == [32, 64, 166]
    assert spans(outcome)[0] == [Span(0, 32), Span(1, 18)]
    assert outcome.totals.wasted_tokens == {}


def test_trl_async_serves_both_versions_on_one_engine() -> None:
    """At 32 s group 2 begins on version 1, beside group 0, which ends on version 0."""
    outcome = run(partial(trl_async, **SMALL), engines=1, slots=1000, versions=2)
    assert requests(outcome, 0) == [(0, 0, "engine-0", 0), (0, 1, "engine-0", 0)]
    assert requests(outcome, 2) == [(32, 0, "engine-0", 0), (32, 1, "engine-0", 0)]
    assert published(outcome) == [32, 152, 174]
    assert spans(outcome) == {1: [Span(0, 10)], 0: [Span(0, 50)], 2: [Span(1, 10)]}


def test_trl_async_needs_an_adapter_for_each_version() -> None:
    with pytest.raises(Exception, match="engine-0 serves 1 at a time, and the schedule needs 2"):
        run(partial(trl_async, **SMALL))
