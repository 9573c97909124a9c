"""Idle times and their causes, on small activities made by hand."""

import numpy as np
from record_story import pipelined_round

from tailrace.page.idle import Activity, IdleShare, IdleTime, idle_shares, idle_times
from tailrace.record.events import EngineStateChanged, OpenWaits, RequestStarted, RoundStarted, logged
from tailrace.record.intervals import Intervals
from tailrace.record.timeline import Timeline
from tailrace.types import SampleId


def intervals(*pairs: tuple[float, float]) -> Intervals:
    return np.array(pairs, dtype=float).reshape(-1, 2)


def test_the_causes_of_a_round_of_two_engines() -> None:
    """engine-0 |--------|                 tail 4-8, rewards 8-9, weights 9-13, publication 13-14
    engine-1    |----------------|
    rewards                      |--|
    trainer                         |--------|--|"""
    requests = intervals((0, 4), (0, 3), (0, 8), (0, 3))
    found = idle_times(
        Activity(
            end_s=14.0,
            requests={"engine-0": requests[:2], "engine-1": requests[2:]},
            rollouts=requests,
            scoring=intervals((8, 9)),
            trainer=intervals((9, 12), (12, 13)),
            publications=intervals((13, 14)),
        )
    )
    assert found == [
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
    found = idle_times(
        Activity(
            end_s=10.0,
            requests={"engine-0": intervals((0, 1)), "engine-1": intervals((0, 6))},
            rollouts=intervals((0, 1), (0, 6)),
            publications=intervals((3, 4)),
            dead={"engine-0": intervals((1, 5)), "engine-1": intervals((6, 7))},
            asleep={"engine-0": intervals((5, 8))},
        )
    )
    assert [each for each in found if each.lane == "engine-0"] == [
        IdleTime("engine-0", 1, 5, "dead"),
        IdleTime("engine-0", 5, 8, "lent"),
        IdleTime("engine-0", 8, 10, "unknown"),
    ]


def test_the_trainer_waits_for_engines_when_all_are_dead() -> None:
    dead = {"engine-0": intervals((2, 9)), "engine-1": intervals((4, 10))}
    requests = {"engine-0": intervals((0, 2)), "engine-1": intervals((0, 4))}
    activity = Activity(end_s=10, requests=requests, rollouts=intervals((0, 2), (0, 4)), dead=dead)
    assert [each[1:] for each in idle_times(activity) if each.lane == "trainer"] == [
        (0, 2, "generation"),
        (2, 4, "tail"),
        (4, 9, "dead"),
        (9, 10, "unknown"),
    ]


def test_held_out_prompts_are_no_rollout() -> None:
    activity = Activity(end_s=3, requests={"engine-0": intervals((0, 2))}, evaluations=intervals((0, 2)))
    assert [each[1:] for each in idle_times(activity) if each.lane == "trainer"] == [
        (0, 2, "evaluation"),
        (2, 3, "unknown"),
    ]


def test_idle_times_are_summed_by_lane_and_cause() -> None:
    found = [
        IdleTime("engine-0", 0, 1, "tail"),
        IdleTime("engine-0", 2, 4, "tail"),
        IdleTime("trainer", 0, 1, "rewards"),
    ]
    assert idle_shares(10.0, found) == [
        IdleShare("trainer", "rewards", 1.0, 0.1),
        IdleShare("engine-0", "tail", 3.0, 0.3),
    ]


def test_the_idle_times_of_a_round() -> None:
    """The drawing of record_story."""
    timeline = Timeline()
    for event in filter(None, map(logged, pipelined_round().events)):
        timeline.on(event)
    assert idle_times(Activity.of(timeline)) == [
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
    activity = Activity.of(timeline)
    assert activity.asleep["engine-1"].tolist() == [[13.0, 14.0]]
    assert activity.dead["engine-1"].tolist() == [[14.0, 15.0]]
    assert [each for each in idle_times(activity) if each.lane != "engine-1"] == [
        IdleTime("trainer", 10.0, 12.0, "unknown"),
        IdleTime("trainer", 12.0, 13.0, "generation"),
        IdleTime("engine-0", 10.0, 12.0, "unknown"),
    ]
