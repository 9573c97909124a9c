"""Schedules that serve several versions at a time, in the world of test_schedules_by_hand.py. Groups have two
samples; prompt 0 has 50 tokens, others 10, so a step takes 22 s, and that of prompt 0 takes 102 s."""

from functools import partial

import pytest

from helpers.virtual import EXACT, Outcome, change, simulate, worlds
from tailrace.controller.base import RunSettings
from tailrace.record.events import Published, RequestEnded, RequestStarted, Stepped
from tailrace.schedules.dora import dora
from tailrace.schedules.laminar import laminar
from tailrace.schedules.trl_async import trl_async
from tailrace.types import Span

THREE_ROUNDS = RunSettings(rounds=3, group_size=2)
SMALL = {"groups_per_step": 1, "groups_in_flight": 2, "staleness": 1}


def run(schedule, engines: int = 2, slots: int = 2, versions: int = 1) -> Outcome:  # type: ignore[no-untyped-def]
    sim = change(EXACT, engines=change(EXACT.engines, slots=slots, versions=versions))
    parts = worlds(sim, lambda sample: 10 if sample.prompt.index else 50, count=engines)
    return simulate(schedule, THREE_ROUNDS, sim, parts=parts)


def requests(outcome: Outcome, prompt: int) -> list[tuple[float, int, str, int]]:
    """When, which sample, where and with how many tokens."""
    started = [event for event in outcome.of(RequestStarted) if event.sample.prompt == prompt]
    return [(event.time_s, event.sample.number, event.engine, event.num_tokens) for event in started]


def spans(outcome: Outcome) -> dict[int, list[Span]]:
    samples = [sample for step in outcome.of(Stepped) for sample in step.samples]
    return {sample.prompt.index: sample.spans for sample in samples}


def published(outcome: Outcome) -> list[float]:
    return [event.end_s for event in outcome.of(Published)]


def test_dora_packs_an_older_version_and_gives_the_freed_engine_the_new_one() -> None:
    """Each engine has a sample of each group. Group 1 ends at 10 s: published at 32 s. Then both engines have
    one sample of version 0, which fit on engine-0. engine-1 loads version 1 and begins group 2, which ends at
    42 s. But group 0 is due: it ends at 50 s, version 2 is published at 152 s, to both."""
    outcome = run(partial(dora, **SMALL))
    assert requests(outcome, 0) == [
        (0, 0, "engine-0", 0), (0, 1, "engine-1", 0), (32, 1, "engine-0", 32),
    ]  # fmt: skip
    assert requests(outcome, 2) == [(32, 0, "engine-1", 0), (32, 1, "engine-1", 0)]
    assert requests(outcome, 3) == [(152, 0, "engine-0", 0), (152, 1, "engine-1", 0)]
    assert published(outcome) == [32, 152, 174]
    assert spans(outcome) == {1: [Span(0, 10)], 0: [Span(0, 50)], 2: [Span(1, 10)]}
    moved = [(event.time_s, event.sample) for event in outcome.of(RequestEnded) if event.outcome == "moved"]
    assert [(time_s, sample.prompt, sample.number) for time_s, sample in moved] == [(32, 0, 1)]


def test_laminar_packs_engines_with_few_samples_and_the_idle_ones_pull() -> None:
    """At 32 s both engines are half full of version 0. Packed, engine-1 is idle: it pulls version 1."""
    outcome = run(partial(laminar, **SMALL, repack_below=0.5))
    assert requests(outcome, 0)[-1] == (32, 1, "engine-0", 32)
    assert requests(outcome, 2) == [(32, 0, "engine-1", 0), (32, 1, "engine-1", 0)]
    assert published(outcome) == [32, 152, 174]
    assert spans(outcome) == {1: [Span(0, 10)], 0: [Span(0, 50)], 2: [Span(1, 10)]}


def test_laminar_without_repack_begins_no_sample_while_every_engine_has_an_older_one() -> None:
    """Group 0 keeps both engines on version 0 until 50 s; then both pull version 1, and group 2 begins."""
    outcome = run(partial(laminar, **SMALL, repack_below=0.0))
    assert requests(outcome, 0) == [(0, 0, "engine-0", 0), (0, 1, "engine-1", 0)]
    assert requests(outcome, 2) == [(50, 0, "engine-0", 0), (50, 1, "engine-1", 0)]
    assert published(outcome) == [32, 152, 174]


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
