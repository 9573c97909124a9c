"""The cause of each second of the trainer and of engines, on small timelines made by hand."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from helpers.record_story import pipelined_round
from tailrace.contracts.engine import Arrival
from tailrace.extras.view.causes import BUSY, CauseShare, causes_of, shares_of
from tailrace.record.events import (
    Accumulated,
    BooksClosed,
    EngineStateChanged,
    Evaluated,
    OpenWaits,
    Published,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    Saved,
    WeightsProbed,
    logged,
)
from tailrace.record.intervals import total, union_of
from tailrace.record.timeline import Lanes, Pairs, RoundSpan, Scoring, ServedRequest, Timeline
from tailrace.types import SampleId

Times = Sequence[tuple[float, float]]


def served(requests: Mapping[str, Times], prompt: int = 0, **parts: Any) -> Timeline:
    """A timeline with requests of each engine."""
    sample = SampleId(prompt, 0, 0)
    ended = [
        ServedRequest(*times, sample, engine, 1, 0, 1, "stop")
        for engine, mine in requests.items()
        for times in mine
    ]
    parts.setdefault("rounds", [RoundSpan(0, parts["end_s"], 0, 0)])
    pairs = Pairs()
    pairs.engines = {engine: Lanes() for engine in requests}
    return Timeline(requests=ended, pairs=pairs, **parts)


class IdleTime(NamedTuple):
    """An idle time of a lane."""

    lane: str
    start_s: float
    end_s: float
    cause: str


def idle_times(timeline: Timeline) -> list[IdleTime]:
    """The idle times of each lane in order. All times of a lane are all of the recorded time, once."""
    found = []
    for lane, causes in causes_of(timeline).items():
        assert sum(map(total, causes.values())) == pytest.approx(timeline.end_s - timeline.start_s)
        assert total(union_of(causes.values())) == pytest.approx(timeline.end_s - timeline.start_s)
        idle = (
            IdleTime(lane, start_s, end_s, cause)
            for cause, times in causes.items()
            if cause not in (*BUSY, "start") and not (lane != "trainer" and cause == "evaluation")
            for start_s, end_s in times.tolist()
        )
        found += sorted(idle, key=lambda each: each.start_s)
    return found


def states(engine: str, *changes: tuple[float, str]) -> list[EngineStateChanged]:
    return [EngineStateChanged(time_s, engine, state, "") for time_s, state in changes]


def test_the_causes_of_a_round_of_two_engines() -> None:
    """engine-0 |--------|                 tail 4-8, rewards 8-9, weights 9-13, publication 13-14
    engine-1    |----------------|
    rewards                      |--|
    trainer                         |--------|--|"""
    timeline = served(
        {"engine-0": [(0, 4), (0, 3)], "engine-1": [(0, 8), (0, 3)]},
        end_s=14.0,
        scorings=[Scoring(8, 9, SampleId(0, 0, 0), 1)],
        passes=[Accumulated(9, 12, (), 1), Accumulated(12, 13, (), 1)],
        publications=[Published(13, 14, 1)],
    )
    assert idle_times(timeline) == [
        # 4 ran at once: no more than 2 run from 3 s on.
        IdleTime("trainer", 0, 3, "generation"),
        IdleTime("trainer", 3, 8, "tail"),
        IdleTime("trainer", 8, 9, "rewards"),
        IdleTime("trainer", 13, 14, "publication"),
        IdleTime("engine-0", 4, 8, "tail"),
        IdleTime("engine-0", 8, 9, "rewards"),
        IdleTime("engine-0", 9, 13, "weights"),
        IdleTime("engine-0", 13, 14, "publication"),
        IdleTime("engine-1", 8, 9, "rewards"),
        IdleTime("engine-1", 9, 13, "weights"),
        IdleTime("engine-1", 13, 14, "publication"),
    ]


def test_dead_and_lent_come_before_every_other_cause() -> None:
    timeline = served(
        {"engine-0": [(0, 1)], "engine-1": [(0, 6)]},
        end_s=10.0,
        publications=[Published(3, 4, 1)],
        states=[
            *states("engine-0", (1, "dead"), (5, "asleep"), (8, "open")),
            *states("engine-1", (6, "dead"), (7, "open")),
        ],
    )
    assert [each for each in idle_times(timeline) if each.lane == "engine-0"] == [
        IdleTime("engine-0", 1, 5, "dead"),
        IdleTime("engine-0", 5, 8, "lent"),
        IdleTime("engine-0", 8, 10, "other"),
    ]


def test_the_trainer_waits_for_engines_when_all_are_dead() -> None:
    dead = [*states("engine-0", (2, "dead"), (9, "open")), *states("engine-1", (4, "dead"))]
    timeline = served({"engine-0": [(0, 2)], "engine-1": [(0, 4)]}, end_s=10, states=dead)
    assert [each[1:] for each in idle_times(timeline) if each.lane == "trainer"] == [
        (0, 2, "generation"),
        (2, 4, "tail"),
        (4, 9, "dead"),
        (9, 10, "other"),
    ]


def test_held_out_prompts_are_no_rollout() -> None:
    timeline = served({"engine-0": [(0, 2)]}, prompt=-1, end_s=3)
    assert [each[1:] for each in idle_times(timeline) if each.lane == "trainer"] == [
        (0, 2, "evaluation"),
        (2, 3, "other"),
    ]


def test_causes_are_summed_by_lane() -> None:
    timeline = served({"engine-0": [(0, 2)]}, end_s=4, passes=[Accumulated(2, 3, (), 1)])
    assert shares_of([causes_of(timeline)], 4.0) == [
        CauseShare("trainer", "generation", 2.0, 0.5),
        CauseShare("trainer", "gradients", 1.0, 0.25),
        CauseShare("trainer", "other", 1.0, 0.25),
        CauseShare("engine-0", "generating", 2.0, 0.5),
        CauseShare("engine-0", "other", 1.0, 0.25),
        CauseShare("engine-0", "weights", 1.0, 0.25),
    ]


def test_the_idle_times_of_a_round() -> None:
    """The drawing of record_story."""
    timeline = Timeline()
    for event in filter(None, map(logged, pipelined_round().events)):
        timeline.on(event)
    assert idle_times(timeline) == [
        IdleTime("trainer", 10.0, 14.0, "generation"),
        IdleTime("trainer", 16.0, 17.0, "generation"),
        IdleTime("trainer", 17.0, 20.0, "tail"),
        IdleTime("trainer", 24.0, 25.0, "publication"),
        IdleTime("engine-0", 20.0, 24.0, "weights"),
        IdleTime("engine-0", 24.0, 25.0, "publication"),
    ]


def test_what_is_open_is_no_idle_time() -> None:
    """A request since 12 s, and an optimizer step that the run waits for since 13 s."""
    timeline = Timeline()
    for event in (
        RoundStarted(10.0, 0, 0),
        RequestStarted(12.0, SampleId(0, 0, 0), "engine-0", 0),
        EngineStateChanged(13.0, "engine-1", "asleep", "lent"),
        EngineStateChanged(14.0, "engine-1", "dead", "signal SIGKILL"),
        OpenWaits(15.0, {"trainer: Step": 13.0, "the pool": 11.0}),
    ):
        timeline.on(event)
    assert [each for each in idle_times(timeline) if each.lane != "engine-1"] == [
        IdleTime("trainer", 10.0, 12.0, "other"),
        IdleTime("trainer", 12.0, 13.0, "generation"),
        IdleTime("engine-0", 10.0, 12.0, "other"),
    ]
    assert [each for each in idle_times(timeline) if each.lane == "engine-1"][-2:] == [
        IdleTime("engine-1", 13.0, 14.0, "lent"),
        IdleTime("engine-1", 14.0, 15.0, "dead"),
    ]


def test_checkpoints_evaluations_start_and_end_have_names() -> None:
    """start 0-2, a checkpoint 2-3, held-out prompts 3-5, whose rewards come at 6; a round 6-8, and then the
    last checkpoint 9-10, after which the run closes at 11."""
    timeline = Timeline()
    held_out = SampleId(-1, 0, 0)
    for event in (
        EngineStateChanged(0.0, "engine-0", "open", ""),
        Saved(3.0, 0, "round_000000", 0, 0, duration_s=1.0),
        RequestStarted(3.0, held_out, "engine-0", 0),
        RequestEnded(5.0, held_out, "engine-0", 4, 4, "stop"),
        Evaluated(6.0, 0, 1, 1.0, 4.0),
        RoundStarted(6.0, 0, 0),
        Accumulated(6.0, 8.0, (), 4),
        RoundEnded(8.0, 0),
        Saved(10.0, 1, "round_000001", 1, 4, duration_s=1.0),
        BooksClosed(11.0, 0, 0),
    ):
        timeline.on(event)
    causes = causes_of(timeline)["trainer"]
    assert {cause: times.tolist() for cause, times in causes.items()} == {
        "start": [[0.0, 2.0]],
        "checkpoint": [[2.0, 3.0], [9.0, 10.0]],
        "evaluation": [[3.0, 6.0]],
        "gradients": [[6.0, 8.0]],
        "end": [[8.0, 9.0], [10.0, 11.0]],
    }


def test_engines_that_load_and_probe_weights_are_publication() -> None:
    arrived = Arrival(1, 0.0, 0.0, 0.1, 1.0)
    timeline = served(
        {"engine-0": [(0, 2), (7, 9)]},
        end_s=9.0,
        publications=[Published(3, 4, 1)],
        probes=[WeightsProbed(5, 6, "engine-0", arrived)],
        rounds=[RoundSpan(0, 9, 0, 0)],
    )
    assert causes_of(timeline)["trainer"]["publication"].tolist() == [[3.0, 6.0]]
