"""What a page receives of a run, at once and bit by bit."""

import json
import os
from base64 import b64decode
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_story import sinks_of, until, write_killed_run, write_run

from helpers.record_story import pipelined_round, play
from tailrace.errors import ConfigError
from tailrace.extras.view.figures import MAX_POINTS, Curves
from tailrace.extras.view.lanes import RunLanes, Straggler
from tailrace.extras.view.run import RunView, open_runs
from tailrace.record.events import RequestEnded, RequestStarted, Row, Spent, Waiting
from tailrace.record.run_log import LogWriter
from tailrace.record.steps import StepMeter
from tailrace.record.timeline import Timeline
from tailrace.types import SampleId


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures and the record of a run."""
    (run,) = open_runs([folder])
    return run.figures(), run.record()


def requests_of(run: RunView, end_s: float = 1_000.0) -> list[Any]:
    """The requests in a range of time from the start, of all engines."""
    lanes = run.window(0.0, end_s, 10)["lanes"]
    return [request for lane in lanes for request in lane.get("requests", ())]


def test_a_page_receives_curves_requests_and_what_follows_from_them(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path / "first")])
    figures, record = run.figures(), run.record()
    assert figures["name"] == "first" and figures["defects"] == record["defects"] == []
    assert figures["state"]["kind"] == "written"
    assert figures["x"] == {"step": [1.0, 2.0], "samples": [2.0, 4.0], "seconds": [6.0, 6.0]}
    assert figures["y"]["reward"] == [[0.5, 1.0]] and run.figure("clip_ratio/region_mean") == [[0.125, 0.125]]
    assert record["engines"] == [{"name": "engine-0", "slots": 2}]
    assert [request[4] for request in requests_of(run)] == ["0.0/0", "0.0/1", "1.0/0", "1.0/1"]
    (trainer, *_) = run.window(0.0, 15.0, 10)["lanes"]
    assert [cause for *_, cause in trainer["pieces"]] == [
        *("generation", "gradients", "step", "generation", "tail", "gradients", "step", "publication")
    ]
    assert {(each["lane"], each["cause"]): each["seconds"] for each in record["shares"]} == {
        ("trainer", "generation"): 5.0,
        ("trainer", "gradients"): 3.0,
        ("trainer", "step"): 3.0,
        ("trainer", "tail"): 3.0,
        ("trainer", "publication"): 1.0,
        ("engine-0", "generating"): 10.0,
        ("engine-0", "weights"): 4.0,
        ("engine-0", "publication"): 1.0,
    }
    assert [each["id"] for each in run.samples("trained")["samples"]] == ["0.0/0", "0.0/1", "1.0/0", "1.0/1"]
    json.loads(msgspec.json.encode([figures, record]))


def test_a_page_receives_the_totals_and_the_distance_to_the_bound(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"bound": {"run_share": 0.5, "run_time_s": 12.0}}')
    _, record = read(write_run(tmp_path))
    assert (record["recorded_s"], record["run_bound"]) == (15.0, (6.0, 12.0))
    tokens = {"generated": 40, "trained": 40, "masked": 0, "parked": 0, "drafted": 0, "wasted": {}}
    assert record["totals"]["tokens"] == tokens
    assert (record["totals"]["publications"], record["totals"]["probes"]) == (1, 0)
    shown = {each["key"]: (each["text"], each["better"]) for each in record["summary"]}
    assert shown["waiting_ratio"] == ("0.571", -1) and shown["samples_per_s"] == ("0.3", 1)
    assert shown["length_max"] == ("20", 0)


def test_long_curves_keep_the_lowest_and_the_highest_value() -> None:
    rows: list[Row] = [
        {"step": n + 1, "wall_time": n, "loss": n % 10, "samples/trained": 1} for n in range(10 * MAX_POINTS)
    ]
    curves = Curves(rows, Path("none"))
    assert [curves.x["step"][at] for at in (0, 1, -1)] == [10, 20, 10 * MAX_POINTS]
    mean, low, high = curves.of("loss")
    assert (len(mean), set(mean), set(low), set(high)) == (MAX_POINTS, {4.5}, {0}, {9})
    assert curves.of("samples/trained")[0][0] == 1 and curves.of("no such figure")[0] == [None] * MAX_POINTS


def test_lanes_far_away_are_shares_and_near_by_are_requests(tmp_path: Path) -> None:
    """Every second all of 50 slots begin a request of 0.5 s."""
    timeline = Timeline(end_s=200.0)
    for second in range(200):
        samples = [SampleId(50 * second + n, 0, 0) for n in range(50)]
        for sample in samples:
            timeline.on(RequestStarted(second, sample, "engine-0", 0))
        for sample in samples:
            timeline.on(RequestEnded(second + 0.5, sample, "engine-0", 4, 4, "stop"))
    timeline.end_s = 200.0
    far, near = (RunLanes([timeline]).window(0.0, end_s, 100) for end_s in (200.0, 20.0))
    assert (far["requests"], near["requests"]) == (10_000, 1_000)
    (_, engine, *_), (_, other, *_) = far["lanes"], near["lanes"]
    assert "requests" not in engine and len(other["requests"]) == 1_000 and "slots_used" not in other
    used = b64decode(engine["slots_used"]["generating"])
    assert len(used) == 100 and set(used) == {128}, "each bin is two seconds, half of them at work"
    assert other["requests"][0][:4] == (0.0, 0.5, 0.0, "stop")


def test_an_advisory_and_an_alarm_stand_at_the_time_at_which_they_arose(tmp_path: Path) -> None:
    """A quarter of the samples of four steps is truncated; the fourth ends 44 s after the start."""
    story = pipelined_round(round=1, start_s=40.0, story=pipelined_round())
    story.tell(Waiting(60.0, 300.0, "pool: a request of engine-0"))
    _, record = read(write_run(tmp_path, story))
    truncation, stalled = record["marks"]
    assert (truncation["time_s"], truncation["kind"]) == (44.0, "truncation")
    assert truncation["text"].startswith("25% of the samples of the last 4 steps")
    assert stalled == {"time_s": 50.0, "kind": "stalled", "text": "pool: a request of engine-0"}


def test_a_page_receives_the_cost_of_a_run_and_what_is_left(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(Spent(10.0, 0.0), Spent(16.5, 1.25), Spent(23.0, 3.5))
    assert read(write_run(tmp_path, story))[0]["cost"] == "3.5000", "its currency is not known"
    config = "run = { rounds = 1, group_size = 2 }\nschedule = { name = 'serial' }\n"
    (tmp_path / "config.toml").write_text(config + "prices = { sampling = 1.0, budget = 5.0 }\n")
    figures, _ = read(tmp_path)
    assert figures["x"]["cost"] == [0.0, 3.5]
    assert figures["cost"] == "3.5000 USD, 1.5000 left of 5.0000"


def test_a_run_that_grows_is_the_run_that_is_read_at_once(tmp_path: Path) -> None:
    run, sinks, story = RunView(tmp_path, "grows"), sinks_of(tmp_path), pipelined_round()
    meter = StepMeter(*sinks, wall_clock=lambda: 1.0)
    for event in story.events:
        meter.on(event)
        run.figures(), run.record()
    meter.close()
    (other,) = open_runs([tmp_path])
    assert run.record() == other.record() and requests_of(run) == requests_of(other)
    assert run.figures() == other.figures() | {"name": "grows"}


def test_a_run_that_is_begun_again_is_read_again(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path)])
    before = run.figures()
    run.record()
    for path in tmp_path.glob("*.json*"):
        path.unlink()
    write_run(tmp_path, pipelined_round(round=5))
    assert requests_of(run)[0][4] == "10.0/0" and run.figures()["x"]["step"] == before["x"]["step"]


def test_of_a_damaged_run_log_the_rest_is_shown(tmp_path: Path) -> None:
    log = (write_run(tmp_path) / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(log.replace(b'"RequestEnded"', b'"RequestFnded"', 1))
    figures, record = read(tmp_path)
    (defect,) = record["defects"]
    assert "of events.jsonl: it is no event of this version" in defect["problem"]
    assert figures["y"]["reward"] == [[0.5, 1.0]] and record["engines"] == [{"name": "engine-0", "slots": 2}]


def test_a_run_of_another_version_is_one_sentence(tmp_path: Path) -> None:
    log = (write_run(tmp_path) / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(log.replace(b'"format":1', b'"format":99', 1))
    (tmp_path / "config.toml").write_text("[no_such_section]\nkey = 1\n")
    figures, record = read(tmp_path)
    assert "the log has format 99, and this version reads format 1" in record["defects"][0]["problem"]
    assert figures["config"] == {"no_such_section.key": 1} and record["end_s"] == 0.0


def test_a_half_deleted_run_is_shown_as_far_as_it_is_there(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    figures, record = read(tmp_path)
    assert figures["y"]["loss"] == [[0.25, 0.25]]
    assert record["defects"][0]["problem"] == "it is not there, so there is no timeline"
    write_run(tmp_path / "other")
    (tmp_path / "other" / "metrics.jsonl").unlink()
    figures, record = read(tmp_path / "other")
    assert figures["x"] == {} and record["end_s"] == 15.0 and record["summary"] == []


def test_the_lives_of_a_run_stand_one_after_another(tmp_path: Path) -> None:
    write_killed_run(tmp_path / "run", until(16.0))
    play(pipelined_round().events, LogWriter(tmp_path / "run" / "events.jsonl", life=2))
    (run,) = open_runs([tmp_path / "run"])
    assert run.record()["lives"] == [0.0, 6.0]
    found = [(request[0], request[3]) for request in requests_of(run)]
    assert found == [
        *[(0.0, "stop"), (0.0, "stop"), (2.0, "unfinished"), (4.0, "unfinished")],
        *[(6.0, "stop"), (6.0, "stop"), (8.0, "stop"), (10.0, "length")],
    ]


def test_a_run_is_finished_when_its_summary_is_the_newest_file(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    assert read(tmp_path)[0]["state"]["kind"] == "finished"
    os.utime(tmp_path / "summary.json", (1.0, 1.0))  # of an earlier life
    assert read(tmp_path)[0]["state"]["kind"] == "written"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    rows = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(rows[0] + b"[1, 2]\n" + rows[1] + b'{"step": 3, "los')
    log = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(log[:-20])
    figures, record = read(tmp_path)
    defects = record["defects"] + figures["defects"]
    assert [(each["file"], each["line"], each["problem"]) for each in defects] == [
        ("events.jsonl", log.count(b"\n"), "the file ends within this line"),
        ("metrics.jsonl", 2, "it is no row of figures"),
        ("metrics.jsonl", 4, "the file ends within this line"),
    ]
    assert figures["x"]["step"] == [1.0, 2.0] and record["end_s"] > 10.0


def test_a_sample_comes_with_its_requests(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path)])
    sample = run.sample("1.0/1")
    assert sample["record"]["text"] == "answer 1"
    assert [(each["engine"], each["start_s"], each["end_s"]) for each in sample["requests"]] == [
        ("engine-0", 4.0, 10.0)
    ]


def test_runs_have_short_names_that_differ(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a/x", "b/x", "b/y")]
    assert [run.name for run in open_runs(folders[1:])] == ["x", "y"]
    assert [run.name for run in open_runs(folders[:2])] == [str(folder) for folder in folders[:2]]


def test_the_folder_of_a_race_is_its_runs(tmp_path: Path) -> None:
    race = [write_run(tmp_path / "race" / name) for name in ("serial", "april")]
    other = write_run(tmp_path / "other")
    assert [run.name for run in open_runs([tmp_path / "race", other])] == ["april", "serial", "other"]
    assert [run.name for run in open_runs([race[0], tmp_path / "race"])] == [
        str(tmp_path / "race" / name) for name in ("serial", "april", "serial")
    ]


def test_rows_out_of_order_are_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    first, second = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(second + first + b'{"loss": 0.5}\n')
    (defect,) = read(tmp_path)[0]["defects"]
    assert defect["problem"] == "its step is before that of the line above"
    assert (defect["line"], defect["num_lines"]) == (2, 2)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has neither events.jsonl nor metrics.jsonl"):
        open_runs([tmp_path])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"it has neither events.jsonl nor metrics.jsonl"):
        open_runs([tmp_path], wait=True)


@pytest.mark.parametrize("content", [None, "", "lock"])
def test_a_page_waits_for_a_run_that_has_not_begun(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "later"
    if content is not None:
        folder.mkdir()
        if content:
            (folder / content).touch()
    (run,) = open_runs([folder], wait=True)
    figures, record = run.figures(), run.record()
    assert figures["state"] == {"kind": "awaited", "text": f"waits for the first record of {folder.name}"}
    assert (figures["x"], record["end_s"], record["engines"], record["shares"]) == ({}, 0.0, [], [])
    write_run(folder)
    assert run.figures()["y"]["reward"] == [[0.5, 1.0]] and run.record()["end_s"] == 15.0


def test_the_sample_that_ends_last_is_the_straggler_of_its_round(tmp_path: Path) -> None:
    story = pipelined_round(round=1, start_s=40.0, story=pipelined_round())
    _, record = read(write_run(tmp_path, story))
    assert record["stragglers"] == [
        Straggler(0, "1.0/1", "engine-0", 20, 7.0, 10.0)._asdict(),
        Straggler(1, "3.0/1", "engine-0", 20, 37.0, 40.0)._asdict(),
    ]
