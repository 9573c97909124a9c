"""The events of a run folded into what took time, and what is still open."""

from pathlib import Path

import pytest

from helpers.record_story import make_group, pipelined_round, play
from tailrace.record.events import (
    BooksClosed,
    ControllerLag,
    EngineStateChanged,
    Event,
    Interval,
    RequestEnded,
    RequestStarted,
    RoundStarted,
    SampleScored,
    Waiting,
    logged,
    time_of,
)
from tailrace.record.run_log import LogWriter
from tailrace.record.timeline import Lanes, RoundSpan, RunTimelines, Scoring, ServedRequest, Timeline, verb_of
from tailrace.types import SampleId


def timeline_of(events: list[Event]) -> Timeline:
    timeline = Timeline()
    for event in events:
        if line := logged(event):
            timeline.on(line)
    return timeline


def test_the_work_of_a_round() -> None:
    timeline = timeline_of(pipelined_round().events)
    assert timeline.requests[2:] == [
        ServedRequest(12.0, 17.0, SampleId(1, 0, 0), "engine-0", 1, 0, 10, "stop"),
        ServedRequest(14.0, 20.0, SampleId(1, 0, 1), "engine-0", 2, 0, 20, "length"),
    ]
    assert timeline.scorings[0] == Scoring(12.0, 12.0, SampleId(0, 0, 0), 1, 1.0, "reward")
    assert timeline.rounds == [RoundSpan(10.0, 25.0, 0, 0)]
    assert [(each.start_s, each.end_s) for each in timeline.trainer] == [
        (14, 15),
        (15, 16),
        (20, 22),
        (22, 24),
    ]
    assert (timeline.end_s, timeline.slots) == (25.0, {"engine-0": 2})
    assert not (timeline.open_requests or timeline.open_scorings or timeline.open_rounds)


def test_what_has_not_ended_is_open_until_the_last_event() -> None:
    """After the step at 16 s, when one request ran since 12 s and one since 14 s."""
    timeline = timeline_of([event for event in pipelined_round().events if time_of(event) <= 16.0])
    assert timeline.open_requests == [
        ServedRequest(12.0, 16.0, SampleId(1, 0, 0), "engine-0", 1, 0, 0),
        ServedRequest(14.0, 16.0, SampleId(1, 0, 1), "engine-0", 2, 0, 0),
    ]
    assert timeline.open_rounds == [RoundSpan(10.0, 16.0, 0, 0)] and timeline.first_round_s == 10.0


def test_an_end_without_a_begin_is_ignored() -> None:
    """As where a line of the log was removed."""
    sample = SampleId(0, 0, 0)
    timeline = timeline_of(
        [RequestEnded(1.0, sample, "engine-0", 5, 5, "stop"), SampleScored(2.0, sample, 1.0, None, 5)]
    )
    assert (timeline.requests, timeline.scorings, timeline.end_s) == ([], [], 2.0)


def test_a_sample_waits_for_its_reward_between_its_turns_and_at_its_end() -> None:
    sample = SampleId(0, 0, 0)
    timeline = timeline_of(
        [
            RequestStarted(0.0, sample, "engine-0", 0),
            RequestEnded(2.0, sample, "engine-0", 4, 4, "stop"),
            RequestStarted(3.0, sample, "engine-1", 4),
            RequestEnded(5.0, sample, "engine-1", 6, 2, "stop"),
            SampleScored(6.0, sample, None, "reward raised", 6),
        ]
    )
    assert [(each.start_s, each.end_s, each.outcome, each.reward) for each in timeline.scorings] == [
        (2.0, 3.0, "next turn", None),
        (5.0, 6.0, "reward raised", None),
    ]
    assert [each.num_gained for each in timeline.requests] == [4, 2]


def test_the_lowest_free_lane_is_taken() -> None:
    lanes = Lanes()
    assert [lanes.take() for _ in range(3)] == [1, 2, 3]
    lanes.give_back(3)
    lanes.give_back(1)
    assert [lanes.take() for _ in range(3)] == [1, 3, 4]
    assert lanes.num_lanes == 4


@pytest.mark.parametrize("wait", ["trainer: Step", "trainer-1: step", "trainer: TorchTrainer.step"])
def test_calls_of_workers_are_told_by_their_verb(wait: str) -> None:
    assert verb_of(wait) == "step"


def test_each_process_of_a_run_has_a_timeline_that_grows_with_the_log(tmp_path: Path) -> None:
    """The first one is killed at 16 s on its clock; it began at 10 s."""
    timelines = RunTimelines(tmp_path / "events.jsonl")
    timelines.update()
    assert timelines.all == []
    play(
        [each for each in pipelined_round().events if time_of(each) <= 16.0],
        LogWriter(tmp_path / "events.jsonl"),
    )
    timelines.update()
    assert [(each.life, each.start_s, each.end_s) for each in timelines.all] == [(1, 0.0, 6.0)]
    writer = LogWriter(tmp_path / "events.jsonl", life=2)
    for event in [*pipelined_round(start_s=500.0).events, BooksClosed(515.0, 0, 0)]:
        writer.on(event)
        timelines.update()
    writer.close()
    first, second = timelines.all
    assert (second.life, second.start_s, second.end_s, second.is_closed) == (2, 6.0, 21.0, True)
    assert [each.start_s for each in second.requests] == [6.0, 6.0, 8.0, 10.0]
    assert len(first.open_requests) == 2 and not first.is_closed


def test_waits_alarms_and_states_of_engines(tmp_path: Path) -> None:
    waits = {"trainer: Step": 12.0, "the pool": 11.0}
    writer = LogWriter(tmp_path / "events.jsonl", waits=lambda: waits)
    for event in (
        RoundStarted(10.0, 0, 0),
        RequestStarted(10.0, make_group(5, [3], [1.0]).samples[0].id, "engine-0", 0),
        EngineStateChanged(12.0, "engine-1", "dead", "signal SIGKILL"),
        Waiting(20.0, 10.0, "the schedule waits for a group"),
        ControllerLag(23.0, 0.0),
    ):
        writer.on(event)
    timelines = RunTimelines(tmp_path / "events.jsonl")
    timelines.update()
    (timeline,) = timelines.all
    assert timeline.slots == {"engine-0": 1, "engine-1": 0}
    assert timeline.waits == {"trainer: Step": 2.0, "the pool": 1.0}
    assert timeline.open_calls("step") == [Interval(2.0, 13.0)]
    assert [(each.time_s, each.why) for each in timeline.states] == [(2.0, "signal SIGKILL")]
    assert timeline.alarms == [Waiting(10.0, 10.0, "the schedule waits for a group")]
    writer.close()
