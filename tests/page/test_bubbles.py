"""Idle times and their causes, on small activities made by hand."""

import numpy as np

from tailrace.page.bubbles import Activity, Bubble, Idle, bubbles, idle_times
from tailrace.record.intervals import Intervals


def intervals(*pairs: tuple[float, float]) -> Intervals:
    return np.array(pairs, dtype=float).reshape(-1, 2)


def test_the_causes_of_a_round_of_two_engines() -> None:
    """engine-0 |--------|                 tail 4-8, rewards 8-9, weights 9-13, publication 13-14
    engine-1    |----------------|
    rewards                      |--|
    trainer                         |--------|--|"""
    requests = intervals((0, 4), (0, 3), (0, 8), (0, 3))
    found = bubbles(
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
        Bubble("trainer", 0, 3, "generation"),
        Bubble("trainer", 3, 8, "tail"),
        Bubble("trainer", 8, 9, "rewards"),
        Bubble("trainer", 13, 14, "publication"),
        Bubble("engine-0", 4, 8, "tail"),
        Bubble("engine-0", 8, 9, "rewards"),
        Bubble("engine-0", 9, 13, "weights"),
        Bubble("engine-0", 13, 14, "publication"),
        Bubble("engine-1", 8, 9, "rewards"),
        Bubble("engine-1", 9, 13, "weights"),
        Bubble("engine-1", 13, 14, "publication"),
    ]


def test_dead_and_lent_come_before_every_other_cause() -> None:
    found = bubbles(
        Activity(
            end_s=10.0,
            requests={"engine-0": intervals((0, 1)), "engine-1": intervals((0, 6))},
            rollouts=intervals((0, 1), (0, 6)),
            publications=intervals((3, 4)),
            dead={"engine-0": intervals((1, 5)), "engine-1": intervals((6, 7))},
            asleep={"engine-0": intervals((5, 8))},
        )
    )
    assert [bubble for bubble in found if bubble.lane == "engine-0"] == [
        Bubble("engine-0", 1, 5, "dead"),
        Bubble("engine-0", 5, 8, "lent"),
        Bubble("engine-0", 8, 10, "unknown"),
    ]


def test_the_trainer_waits_for_engines_when_all_are_dead() -> None:
    dead = {"engine-0": intervals((2, 9)), "engine-1": intervals((4, 10))}
    requests = {"engine-0": intervals((0, 2)), "engine-1": intervals((0, 4))}
    activity = Activity(end_s=10, requests=requests, rollouts=intervals((0, 2), (0, 4)), dead=dead)
    assert [bubble[1:] for bubble in bubbles(activity) if bubble.lane == "trainer"] == [
        (0, 2, "generation"),
        (2, 4, "tail"),
        (4, 9, "dead"),
        (9, 10, "unknown"),
    ]


def test_held_out_prompts_are_no_rollout() -> None:
    activity = Activity(end_s=3, requests={"engine-0": intervals((0, 2))}, evaluations=intervals((0, 2)))
    assert [bubble[1:] for bubble in bubbles(activity) if bubble.lane == "trainer"] == [
        (0, 2, "evaluation"),
        (2, 3, "unknown"),
    ]


def test_what_is_not_recorded_is_not_called_idle() -> None:
    activity = Activity(
        end_s=10,
        requests={"engine-0": intervals((0, 2), (8, 10))},
        trainer=intervals((0, 10)),
        unrecorded=intervals((3, 8)),
    )
    found = bubbles(activity)
    assert found == [Bubble("engine-0", 2, 3, "weights")]
    assert idle_times(5.0, found) == [Idle("engine-0", "weights", 1.0, 0.2)]


def test_idle_times_are_summed_by_lane_and_cause() -> None:
    found = [
        Bubble("engine-0", 0, 1, "tail"),
        Bubble("engine-0", 2, 4, "tail"),
        Bubble("trainer", 0, 1, "rewards"),
    ]
    assert idle_times(10.0, found) == [
        Idle("trainer", "rewards", 1.0, 0.1),
        Idle("engine-0", "tail", 3.0, 0.3),
    ]
