"""What a page receives of a run, at once and bit by bit."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_story import sinks_of, until, write_killed_run, write_run

from helpers.record_story import pipelined_round, play
from tailrace.errors import ConfigError
from tailrace.extras.view.run import RunView, Straggler, open_runs
from tailrace.record.events import Spent
from tailrace.record.run_log import LogWriter
from tailrace.record.steps import StepMeter


def payload_of(folder: Path) -> dict[str, Any]:
    (run,) = open_runs([folder])
    run.update()
    return run.payload()


def test_a_page_receives_requests_rows_and_what_follows_from_them(tmp_path: Path) -> None:
    payload = payload_of(write_run(tmp_path / "first"))
    assert payload["name"] == "first" and payload["defects"] == [] and payload["state"]["kind"] == "written"
    assert payload["engines"] == [{"name": "engine-0", "slots": 2}]
    assert payload["requests"]["sample"] == ("0.0/0", "0.0/1", "1.0/0", "1.0/1")
    assert [row["reward"] for row in payload["rows"]] == [0.5, 1.0]
    assert [row["samples/trained"] for row in payload["rows"]] == [2, 2]
    assert payload["idle_times"][3] == [
        "generation",
        "generation",
        "tail",
        "publication",
        "weights",
        "publication",
    ]
    assert [each["id"] for each in payload["samples"]] == ["0.0/0", "0.0/1", "1.0/0", "1.0/1"]
    json.loads(msgspec.json.encode(payload))


def test_a_page_receives_the_cost_of_a_run_and_what_is_left(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(Spent(10.0, 0.0), Spent(16.5, 1.25), Spent(23.0, 3.5))
    assert payload_of(write_run(tmp_path, story))["cost"] == "", "its prices are not known"
    config = "run = { rounds = 1, group_size = 2 }\nschedule = { name = 'serial' }\n"
    (tmp_path / "config.toml").write_text(config + "prices = { sampling = 1.0, budget = 5.0 }\n")
    assert payload_of(tmp_path)["cost"] == "3.5000 USD, 1.5000 left of 5.0000"


def test_a_run_that_grows_is_the_run_that_is_read_at_once(tmp_path: Path) -> None:
    run, sinks, story = RunView(tmp_path, "grows"), sinks_of(tmp_path), pipelined_round()
    meter = StepMeter(*sinks, wall_clock=lambda: 1.0)
    for event in story.events:
        meter.on(event)
        run.update()
    meter.close()
    run.update()
    (other,) = open_runs([tmp_path])
    other.update()
    assert run.payload() == other.payload() | {"name": "grows"}


def test_a_run_that_is_begun_again_is_read_again(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path)])
    run.update()
    before = run.payload()
    for path in tmp_path.glob("*.json*"):
        path.unlink()
    write_run(tmp_path, pipelined_round(round=5))
    run.update()
    payload = run.payload()
    assert payload["requests"]["sample"][0] == "10.0/0" and len(payload["rows"]) == len(before["rows"])


def test_a_damaged_run_log_is_refused(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path)])
    log = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(log.replace(b'"RequestEnded"', b'"RequestFnded"', 1))
    with pytest.raises(ConfigError, match=r"line \d+ of events.jsonl: it is no event of this version"):
        run.update()


def test_the_lives_of_a_run_stand_one_after_another(tmp_path: Path) -> None:
    write_killed_run(tmp_path / "run", until(16.0))
    play(pipelined_round().events, LogWriter(tmp_path / "run" / "events.jsonl", life=2))
    payload = payload_of(tmp_path / "run")
    assert payload["lives"] == [0.0, 6.0]
    assert payload["requests"]["start_s"] == (0.0, 0.0, 6.0, 6.0, 8.0, 10.0)
    assert payload["unfinished"]["sample"] == ("1.0/0", "1.0/1")


def test_a_run_is_finished_when_its_summary_is_the_newest_file(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    assert payload_of(tmp_path)["state"]["kind"] == "finished"
    os.utime(tmp_path / "summary.json", (1.0, 1.0))  # of an earlier life
    assert payload_of(tmp_path)["state"]["kind"] == "written"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    rows = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(rows[0] + b"[1, 2]\n" + rows[1] + b'{"step": 3, "los')
    log = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(log[:-20])
    payload = payload_of(tmp_path)
    assert [(each["file"], each["line"], each["problem"]) for each in payload["defects"]] == [
        ("events.jsonl", log.count(b"\n"), "the file ends within this line"),
        ("metrics.jsonl", 2, "it is no row of figures"),
        ("metrics.jsonl", 4, "the file ends within this line"),
    ]
    assert len(payload["rows"]) == 2 and len(payload["requests"]["sample"]) == 4


def test_a_sample_comes_with_its_requests(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path)])
    run.update()
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
    (defect,) = payload_of(tmp_path)["defects"]
    assert defect["problem"] == "its step is before that of the line above"
    assert (defect["line"], defect["num_lines"]) == (2, 2)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has neither events.jsonl nor metrics.jsonl"):
        open_runs([tmp_path])


def test_an_empty_run_is_an_empty_page(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    run = RunView(tmp_path, "empty")
    run.update()
    payload = run.payload()
    assert payload["engines"] == [] and payload["rows"] == [] and payload["idle_times"] == [[], [], [], []]


def test_the_sample_that_ends_last_is_the_straggler_of_its_round(tmp_path: Path) -> None:
    story = pipelined_round(round=1, start_s=40.0, story=pipelined_round())
    assert payload_of(write_run(tmp_path, story))["stragglers"] == [
        Straggler("round 0", "1.0/1", "engine-0", 2, 10.0, 20, 3.0)._asdict(),
        Straggler("round 1", "3.0/1", "engine-0", 2, 40.0, 20, 3.0)._asdict(),
    ]
