"""A run log as a trace for Perfetto."""

import json
from pathlib import Path
from typing import Any

from helpers.record_story import make_group, pipelined_round, play
from tailrace.extras.view.perfetto import write_perfetto
from tailrace.record.events import (
    ControllerLag,
    EngineStateChanged,
    Evaluated,
    Event,
    RequestEnded,
    RequestStarted,
    RoundStarted,
    SampleScored,
    TokensWasted,
    time_of,
)
from tailrace.record.run_log import LogWriter
from tailrace.types import SampleId

REQUIRED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "i": {"name", "s", "pid", "tid", "ts"},
}
"""Fields that the trace-event format asks of each phase."""


def trace_of(events: list[Any], folder: Path) -> list[dict[str, Any]]:
    play(events, LogWriter(folder / "events.jsonl"))
    return written(folder)


def written(folder: Path) -> list[dict[str, Any]]:
    write_perfetto(folder / "events.jsonl", folder / "trace.json")
    trace: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())
    return trace


def test_the_trace_keeps_to_the_format(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(Evaluated(30.0, 1, 8, reward=0.5, mean_tokens=3.0))
    for record in trace_of(story.events, tmp_path):
        assert record.keys() >= REQUIRED[record["ph"]] | {"ph"}
        assert all(isinstance(record[key], int) for key in ("pid", "tid"))
        assert all(
            isinstance(record[key], int) and record[key] >= 0 for key in ("ts", "dur") if key in record
        )


def test_requests_stand_in_the_slots_that_served_them(tmp_path: Path) -> None:
    trace = trace_of(pipelined_round().events, tmp_path)
    slices = [r for r in trace if r["ph"] == "X" and r["pid"] == 2]
    assert [(r["args"]["sample"], r["name"], r["tid"], r["ts"], r["dur"]) for r in slices] == [
        ("0.0/0", "group 0", 1, 0, 2_000_000),
        ("0.0/1", "group 0", 2, 0, 4_000_000),
        ("1.0/0", "group 1", 1, 2_000_000, 5_000_000),
        ("1.0/1", "group 1", 2, 4_000_000, 6_000_000),
    ]
    assert slices[3]["args"] == {"sample": "1.0/1", "tokens": 20, "had": 0, "outcome": "length"}


def test_the_run_has_lanes_for_rounds_trainer_and_weights(tmp_path: Path) -> None:
    trace = trace_of(pipelined_round().events, tmp_path)
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in trace if r["name"] == "thread_name"}
    assert names == {
        (1, 1): "rounds",
        (1, 2): "trainer",
        (1, 3): "weights",
        (1, 4): "controller",
        (1, 5): "waits",
        (2, 1): "slot 1",
        (2, 2): "slot 2",
        (10_000, 1): "sample 1",
    }
    processes = {r["pid"]: r["args"]["name"] for r in trace if r["name"] == "process_name"}
    assert processes == {1: "run", 2: "engine-0", 10_000: "scoring"}
    slices = [
        (names[1, r["tid"]], r["name"], r["ts"], r["dur"]) for r in trace if r["ph"] == "X" and r["pid"] == 1
    ]
    assert slices == [
        ("rounds", "round 1", 0, 15_000_000),
        ("trainer", "accumulate", 4_000_000, 1_000_000),
        ("trainer", "step 1", 5_000_000, 1_000_000),
        ("trainer", "accumulate", 10_000_000, 2_000_000),
        ("trainer", "step 2", 12_000_000, 2_000_000),
        ("weights", "publish 1", 14_000_000, 1_000_000),
    ]


def test_an_arrow_goes_from_a_groups_last_request_to_its_step(tmp_path: Path) -> None:
    trace = trace_of(pipelined_round().events, tmp_path)
    arrows = [(r["ph"], r["id"], r["pid"], r["tid"], r["ts"]) for r in trace if r["ph"] in "sf"]
    assert arrows == [
        ("s", 1, 2, 2, 3_999_999),
        ("f", 1, 1, 2, 5_000_000),
        ("s", 2, 2, 2, 9_999_999),
        ("f", 2, 1, 2, 12_000_000),
    ]


def test_a_cancelled_request_starts_no_arrow(tmp_path: Path) -> None:
    story = pipelined_round()
    spare = make_group(0, [1, 1, 1], [0.0, 0.0, 0.0]).samples[2]
    story.request(spare, 10, 14.5, outcome="cancelled")
    trace = trace_of(story.events, tmp_path)
    assert next(r["ts"] for r in trace if r["ph"] == "s") == 3_999_999


def test_two_engines_have_lanes_of_their_own(tmp_path: Path) -> None:
    story = pipelined_round()
    story.request(make_group(5, [1], [0.0]).samples[0], 11, 12, engine="engine-1")
    trace = trace_of(story.events, tmp_path)
    assert [
        (r["pid"], r["tid"]) for r in trace if r["ph"] == "X" and r["name"] == "group 5" and r["pid"] < 10_000
    ] == [(3, 1)]


def test_what_still_runs_at_the_end_is_in_the_trace(tmp_path: Path) -> None:
    events = pipelined_round().events[:-1]
    events.append(RequestStarted(25.0, make_group(5, [1], [0.0]).samples[0].id, "engine-0", 0))
    trace = trace_of(events, tmp_path)
    outcomes = [r["args"]["outcome"] for r in trace if r["name"] == "group 5"]
    assert outcomes == ["unfinished"]
    assert any(r["name"] == "round 1" and r["dur"] == 15_000_000 for r in trace)


def test_a_run_without_events_is_a_valid_trace(tmp_path: Path) -> None:
    assert all(record["ph"] == "M" for record in trace_of([], tmp_path))


def test_a_sample_has_a_lane_from_its_last_token_to_its_reward(tmp_path: Path) -> None:
    """Two rewards are awaited at the same time; the third takes the lane that is free again."""
    ids = [SampleId(0, 0, number) for number in range(3)]
    events: list[Event] = [RequestStarted(0.0, id, "engine-0", 0) for id in ids]
    for id, end_s, scored_s in zip(ids, (1.0, 2.0, 5.0), (4.0, 6.0, 7.0), strict=True):
        events.append(RequestEnded(end_s, id, "engine-0", 9, 9, "stop"))
        events.append(SampleScored(scored_s, id, 1.0, None, 9))
    events.sort(key=time_of)
    trace = trace_of(events, tmp_path)
    slices = [r for r in trace if r["ph"] == "X" and r["pid"] == 10_000]
    assert [(r["args"]["sample"], r["tid"], r["ts"] / 1e6, r["dur"] / 1e6) for r in slices] == [
        ("0.0/0", 1, 1.0, 3.0),
        ("0.0/1", 2, 2.0, 4.0),
        ("0.0/2", 1, 5.0, 2.0),
    ]
    assert {r["args"]["outcome"] for r in slices} == {"reward 1.0"}


def test_a_sample_that_is_never_scored_gives_its_lane_back(tmp_path: Path) -> None:
    ids = [SampleId(0, 0, number) for number in range(2)]
    events: list[Event] = []
    for start_s, id in enumerate(ids):
        events.append(RequestStarted(start_s, id, "engine-0", 0))
        events.append(RequestEnded(start_s + 0.25, id, "engine-0", 9, 9, "stop"))
        events.append(TokensWasted(start_s + 0.5, id, 9, "raced"))
    trace = trace_of(events, tmp_path)
    slices = [r for r in trace if r["ph"] == "X" and r["pid"] == 10_000]
    assert [(r["tid"], r["args"]["outcome"]) for r in slices] == [(1, "raced")] * 2


def test_a_late_controller_has_a_lane(tmp_path: Path) -> None:
    events = [RoundStarted(0.0, 0, 0), ControllerLag(3.0, 0.5)]
    late = next(r for r in trace_of(events, tmp_path) if r["name"] == "late")
    assert (late["pid"], late["tid"], late["ts"], late["dur"]) == (1, 4, 2_500_000, 500_000)


def test_there_are_no_more_lanes_than_requests_at_once(tmp_path: Path) -> None:
    ids = [SampleId(0, 0, number) for number in range(40)]
    events: list[Event] = []
    for start_s, id in enumerate(ids):
        if start_s >= 3:
            events.append(RequestEnded(start_s, ids[start_s - 3], "engine-0", 9, 9, "cancelled"))
        events.append(RequestStarted(start_s, id, "engine-0", 0))
    trace = trace_of(events, tmp_path)
    assert {r["tid"] for r in trace if r["ph"] == "X" and r["pid"] == 2} == {1, 2, 3}


def test_the_state_of_an_engine_is_a_mark_in_its_process(tmp_path: Path) -> None:
    events: list[Any] = [
        RequestStarted(1.0, SampleId(0, 0, 0), "engine-0", 0),
        RequestEnded(2.0, SampleId(0, 0, 0), "engine-0", 5, 5, "evicted"),
        EngineStateChanged(2.0, "engine-0", "dead", "signal SIGKILL"),
        EngineStateChanged(3.0, "engine-1", "open", "it was restarted"),
    ]
    trace = trace_of(events, tmp_path)
    processes = {r["args"]["name"]: r["pid"] for r in trace if r["name"] == "process_name"}
    marks = [(r["pid"], r["name"], r["s"], r["ts"], r["args"]) for r in trace if r["ph"] == "i"]
    assert marks == [
        (processes["engine-0"], "engine-0 is dead", "p", 1_000_000, {"why": "signal SIGKILL"}),
        (processes["engine-1"], "engine-1 is open", "p", 2_000_000, {"why": "it was restarted"}),
    ]


def test_between_two_turns_a_sample_stands_among_those_that_are_scored(tmp_path: Path) -> None:
    """Two turns of one sample, a second apart; every lane is given back."""
    one, other = SampleId(0, 0, 0), SampleId(1, 0, 0)
    events: list[Event] = [
        RoundStarted(10.0, 0, version=0),
        RequestStarted(10.0, one, "engine-0", 0),
        RequestEnded(12.0, one, "engine-0", 4, 4, "stop"),
        RequestStarted(13.0, one, "engine-0", 4),
        RequestEnded(15.0, one, "engine-0", 6, 2, "stop"),
        SampleScored(16.0, one, 1.0, None, 6),
        RequestStarted(17.0, other, "engine-0", 0),
        RequestEnded(18.0, other, "engine-0", 1, 1, "stop"),
        SampleScored(19.0, other, 0.0, None, 1),
    ]
    slices = [r for r in trace_of(events, tmp_path) if r["ph"] == "X" and "sample" in r["args"]]
    slices.sort(key=lambda record: record["ts"])
    assert [(r["args"]["sample"], r["args"]["outcome"], r["tid"], r["ts"], r["dur"]) for r in slices] == [
        ("0.0/0", "stop", 1, 0, 2_000_000),
        ("0.0/0", "next turn", 1, 2_000_000, 1_000_000),
        ("0.0/0", "stop", 1, 3_000_000, 2_000_000),
        ("0.0/0", "reward 1.0", 1, 5_000_000, 1_000_000),
        ("1.0/0", "stop", 1, 7_000_000, 1_000_000),
        ("1.0/0", "reward 0.0", 1, 8_000_000, 1_000_000),
    ]


def test_what_a_live_run_waited_for_at_its_end_has_a_lane(tmp_path: Path) -> None:
    waits = {"trainer: Step": 11.0, "the pool": 10.5}
    writer = LogWriter(tmp_path / "events.jsonl", waits=lambda: waits)
    for event in (RoundStarted(10.0, 0, 0), ControllerLag(13.0, 0.0)):
        writer.on(event)
    slices = [each for each in written(tmp_path) if each["ph"] == "X" and each["name"] != "late"]
    assert [(each["name"], each["tid"], each["ts"], each["dur"]) for each in slices] == [
        ("round 1", 1, 0, 3_000_000),
        ("the pool", 5, 500_000, 2_500_000),
        ("trainer: Step", 5, 1_000_000, 2_000_000),
    ]
    writer.close()


def test_the_processes_of_a_run_follow_one_another(tmp_path: Path) -> None:
    """The first is killed at 16 s on its clock, 6 s after its first event."""
    begun = [event for event in pipelined_round().events if time_of(event) <= 16.0]
    play(begun, LogWriter(tmp_path / "events.jsonl"))
    play(pipelined_round(start_s=500.0).events, LogWriter(tmp_path / "events.jsonl", life=2))
    trace = written(tmp_path)
    rounds = [(each["ts"], each["dur"]) for each in trace if each["name"] == "round 1"]
    assert rounds == [(0, 6_000_000), (6_000_000, 15_000_000)]
    assert [each["args"]["name"] for each in trace if each["name"] == "process_name"].count("engine-0") == 1
    outcomes = [each["args"]["outcome"] for each in trace if each["name"] == "group 1" and each["pid"] == 2]
    assert outcomes == ["unfinished", "unfinished", "stop", "length"]
