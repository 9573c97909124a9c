import json
from pathlib import Path
from typing import Any

from record_story import make_group, pipelined_round, play

from tailrace.record.events import Evaluated, RequestStarted
from tailrace.record.lanes import Lanes
from tailrace.record.trace import TraceWriter

REQUIRED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "i": {"name", "s", "pid", "tid", "ts"},
}
"""Fields that the trace-event format asks of each phase."""


def trace_of(events: list[Any], path: Path) -> list[dict[str, Any]]:
    play(events, TraceWriter(path))
    trace: list[dict[str, Any]] = json.loads(path.read_text())
    return trace


def test_the_trace_keeps_to_the_format(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(Evaluated(30.0, 1, 8, accuracy=0.5, mean_tokens=3.0))
    for record in trace_of(story.events, tmp_path / "trace.json"):
        assert record.keys() >= REQUIRED[record["ph"]] | {"ph"}
        assert all(isinstance(record[key], int) for key in ("pid", "tid"))
        assert all(
            isinstance(record[key], int) and record[key] >= 0 for key in ("ts", "dur") if key in record
        )


def test_requests_stand_in_the_slots_that_served_them(tmp_path: Path) -> None:
    trace = trace_of(pipelined_round().events, tmp_path / "trace.json")
    slices = [r for r in trace if r["ph"] == "X" and r["pid"] == 2]
    assert [(r["args"]["sample"], r["name"], r["tid"], r["ts"], r["dur"]) for r in slices] == [
        ("0.0/0", "group 0", 1, 0, 2_000_000),
        ("0.0/1", "group 0", 2, 0, 4_000_000),
        ("1.0/0", "group 1", 1, 2_000_000, 5_000_000),
        ("1.0/1", "group 1", 2, 4_000_000, 6_000_000),
    ]
    assert slices[3]["args"] == {"sample": "1.0/1", "tokens": 20, "had": 0, "outcome": "length"}


def test_the_run_has_lanes_for_rounds_trainer_and_weights(tmp_path: Path) -> None:
    trace = trace_of(pipelined_round().events, tmp_path / "trace.json")
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in trace if r["name"] == "thread_name"}
    assert names == {
        (1, 1): "rounds",
        (1, 2): "trainer",
        (1, 3): "weights",
        (2, 1): "slot 1",
        (2, 2): "slot 2",
    }
    processes = {r["pid"]: r["args"]["name"] for r in trace if r["name"] == "process_name"}
    assert processes == {1: "run", 2: "engine0"}
    slices = [
        (names[1, r["tid"]], r["name"], r["ts"], r["dur"]) for r in trace if r["ph"] == "X" and r["pid"] == 1
    ]
    assert slices == [
        ("trainer", "accumulate", 4_000_000, 1_000_000),
        ("trainer", "step 1", 5_000_000, 1_000_000),
        ("trainer", "accumulate", 10_000_000, 2_000_000),
        ("trainer", "step 2", 12_000_000, 2_000_000),
        ("weights", "publish 1", 14_000_000, 1_000_000),
        ("rounds", "round 0", 0, 15_000_000),
    ]


def test_an_arrow_goes_from_a_groups_last_request_to_its_step(tmp_path: Path) -> None:
    trace = trace_of(pipelined_round().events, tmp_path / "trace.json")
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
    trace = trace_of(story.events, tmp_path / "trace.json")
    assert next(r["ts"] for r in trace if r["ph"] == "s") == 3_999_999


def test_two_engines_have_lanes_of_their_own(tmp_path: Path) -> None:
    story = pipelined_round()
    story.request(make_group(5, [1], [0.0]).samples[0], 11, 12, engine="engine1")
    trace = trace_of(story.events, tmp_path / "trace.json")
    assert [(r["pid"], r["tid"]) for r in trace if r["ph"] == "X" and r["name"] == "group 5"] == [(3, 1)]


def test_what_still_runs_at_the_end_is_in_the_trace(tmp_path: Path) -> None:
    events = pipelined_round().events[:-1]
    events.append(RequestStarted(24.5, make_group(5, [1], [0.0]).samples[0].id, "engine0", 0))
    trace = trace_of(events, tmp_path / "trace.json")
    outcomes = [r["args"]["outcome"] for r in trace if r["name"] == "group 5"]
    assert outcomes == ["unfinished"]
    assert trace[-1]["name"] == "round 0"


def test_equal_events_make_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        trace_of(pipelined_round().events, tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_run_without_events_is_a_valid_trace(tmp_path: Path) -> None:
    assert all(record["ph"] == "M" for record in trace_of([], tmp_path / "trace.json"))


def test_the_lowest_free_lane_is_taken() -> None:
    lanes = Lanes()
    assert [lanes.take() for _ in range(3)] == [0, 1, 2]
    lanes.give_back(2)
    lanes.give_back(0)
    assert [lanes.take() for _ in range(3)] == [0, 2, 3]
    assert lanes.num_lanes == 4
