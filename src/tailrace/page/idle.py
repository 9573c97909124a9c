"""When engines and the trainer were idle, and what they waited for.

The causes are read from what else the run log has at that time. Where several apply, the first of the list
counts.

    of an engine                                         of the trainer
    dead          it was dead                            publication   it wrote weights for the engines
    lent          it slept, its device was lent          evaluation    only held-out prompts were generated
    publication   weights were published                 tail          at most half as many requests ran as
    tail          other engines still generated                        ran at once at any time
    rewards       samples waited for their rewards       generation    more ran
    weights       the trainer computed: new weights      rewards       samples waited for their rewards
                  were to come                           dead          every engine was dead
    unknown       nothing else is recorded               unknown       nothing else is recorded
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tailrace.record.events import Interval
from tailrace.record.intervals import (
    EMPTY,
    Intervals,
    at_most,
    complement,
    intersect,
    most_at_once,
    subtract,
    union,
    union_of,
)
from tailrace.record.timeline import Timeline

TRAINER = "trainer"
TAIL_SHARE = 0.5
"""The trainer waits for the tail when no more requests run than this share of the most that ran at once."""


class IdleTime(NamedTuple):
    """An idle time of an engine or of the trainer."""

    lane: str
    start_s: float
    end_s: float
    cause: str


@dataclass
class Activity:
    """What one process of a run did, as intervals in seconds."""

    start_s: float = 0.0
    end_s: float = 0.0
    requests: Mapping[str, Intervals] = field(default_factory=dict)
    """Of each engine, every request; evaluations are in it."""
    evaluations: Intervals = field(default_factory=lambda: EMPTY)
    """Requests for held-out prompts."""
    rollouts: Intervals = field(default_factory=lambda: EMPTY)
    """Requests of training samples."""
    scoring: Intervals = field(default_factory=lambda: EMPTY)
    trainer: Intervals = field(default_factory=lambda: EMPTY)
    publications: Intervals = field(default_factory=lambda: EMPTY)
    dead: Mapping[str, Intervals] = field(default_factory=dict)
    """When engines were dead, as are those in `asleep` when they slept."""
    asleep: Mapping[str, Intervals] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline) -> "Activity":
        """What a timeline has from its first round on, what is open included."""
        requests = [*timeline.requests, *timeline.open_requests]
        by_engine: dict[str, list[Interval]] = {engine: [] for engine in timeline.slots}
        for request in requests:
            by_engine[request.engine].append(request)
        return cls(
            start_s=timeline.first_round_s,
            end_s=timeline.end_s,
            requests={engine: _times(mine) for engine, mine in by_engine.items()},
            evaluations=_times(each for each in requests if each.is_evaluation),
            rollouts=_times(each for each in requests if not each.is_evaluation),
            scoring=_times([*timeline.scorings, *timeline.open_scorings]),
            trainer=_times([*timeline.trainer, *timeline.open_calls("accumulate", "step")]),
            publications=_times([*timeline.publications, *timeline.open_calls("publish")]),
            dead=_in_state(timeline, "dead"),
            asleep=_in_state(timeline, "asleep"),
        )


def _times(work: Iterable[Interval]) -> Intervals:
    return np.array([(each.start_s, each.end_s) for each in work]).reshape(-1, 2)


def _in_state(timeline: Timeline, wanted: str) -> dict[str, Intervals]:
    found: dict[str, Intervals] = {}
    for engine in {state.engine for state in timeline.states}:
        mine = [state for state in timeline.states if state.engine == engine]
        ends = [*(state.time_s for state in mine[1:]), timeline.end_s]
        times = [(each.time_s, end) for each, end in zip(mine, ends, strict=True) if each.state == wanted]
        found[engine] = union(times)
    return found


class IdleShare(NamedTuple):
    """How long a lane was idle for one cause."""

    lane: str
    cause: str
    seconds: float
    share: float
    """Of the recorded time."""


def idle_times(activity: Activity) -> list[IdleTime]:
    """The idle times of every engine and of the trainer, with their causes."""
    busy = {engine: union(requests) for engine, requests in activity.requests.items()}
    trainer, rollouts = union(activity.trainer), activity.rollouts
    publishing, scoring = ("publication", union(activity.publications)), ("rewards", union(activity.scoring))
    generating, whole = union_of(busy.values()), (activity.start_s, activity.end_s)
    all_dead = union([whole]) if busy else EMPTY
    for engine in busy:
        all_dead = intersect(all_dead, activity.dead.get(engine, EMPTY))
    causes_of_trainer = (
        publishing,
        ("evaluation", subtract(union(activity.evaluations), union(rollouts))),
        ("tail", at_most(rollouts, TAIL_SHARE * most_at_once(rollouts))),
        ("generation", generating),
        scoring,
        ("dead", all_dead),
    )
    found = _attributed(TRAINER, complement(trainer, whole), causes_of_trainer)
    for engine in sorted(busy):
        causes = (
            ("dead", activity.dead.get(engine, EMPTY)),
            ("lent", activity.asleep.get(engine, EMPTY)),
            publishing,
            ("tail", generating),  # while this engine is idle, whatever is generated is generated by others
            scoring,
            ("weights", trainer),
        )
        found += _attributed(engine, complement(busy[engine], whole), causes)
    return found


def _attributed(lane: str, idle: Intervals, causes: Iterable[tuple[str, Intervals]]) -> list[IdleTime]:
    found: list[IdleTime] = []
    for cause, times in causes:
        found += (IdleTime(lane, start, end, cause) for start, end in intersect(idle, times).tolist())
        idle = subtract(idle, times)
    found += (IdleTime(lane, start, end, "unknown") for start, end in idle.tolist())
    return sorted(found, key=lambda each: each.start_s)


def idle_shares(recorded_s: float, found: Iterable[IdleTime]) -> list[IdleShare]:
    """Seconds and share of idle time by lane and cause, the trainer first and the largest cause first.

    Args:
        recorded_s: the recorded time of the run.
    """
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for lane, start_s, end_s, cause in found:
        sums[lane, cause] += end_s - start_s
    rows = [
        IdleShare(lane, cause, s, s / recorded_s if recorded_s else 0.0) for (lane, cause), s in sums.items()
    ]
    return sorted(rows, key=lambda row: (row.lane != TRAINER, row.lane, -row.seconds, row.cause))
