"""What a page receives of a run, at once and bit by bit."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_story import until, write_killed_run, write_run
from record_story import pipelined_round

from tailrace.errors import ConfigError
from tailrace.page.run import Have, RunView, open_runs


def payload_of(folder: Path) -> dict[str, Any]:
    (run,) = open_runs([folder])
    run.update()
    return run.payload(Have())


def test_a_page_receives_requests_rows_and_what_follows_from_them(tmp_path: Path) -> None:
    payload = payload_of(write_run(tmp_path / "first"))
    assert payload["name"] == "first" and payload["defects"] == [] and payload["state"]["kind"] == "written"
    assert payload["engines"] == [{"name": "engine-0", "slots": 2}]
    assert payload["requests"]["sample"] == ("0.0/0", "0.0/1", "1.0/0", "1.0/1")
    assert [row["reward"] for row in payload["rows"]] == [0.5, 1.0]
    assert [row["samples/trained"] for row in payload["rows"]] == [2, 2]
    assert payload["bubbles"][3] == [
        "generation",
        "generation",
        "tail",
        "publication",
        "weights",
        "publication",
    ]
    assert [each["id"] for each in payload["samples"]] == ["0.0/0", "0.0/1", "1.0/0", "1.0/1"]
    json.loads(msgspec.json.encode(payload))


def test_only_what_is_new_is_sent_again(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path)])
    run.update()
    known = Have(generation=0, requests=3, rows=1)
    payload = run.payload(known)
    assert (payload["requests_from"], payload["requests"]["sample"]) == (3, ("1.0/1",))
    assert (payload["rows_from"], len(payload["rows"])) == (1, 1)


def test_a_run_that_is_begun_again_is_sent_whole(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path)])
    run.update()
    for path in tmp_path.glob("*.json*"):
        path.unlink()
    write_run(tmp_path, pipelined_round(round=5))
    run.update()
    payload = run.payload(Have(generation=0, requests=4, rows=2))
    assert (payload["generation"], payload["requests_from"]) == (1, 0)
    assert payload["requests"]["sample"][0] == "10.0/0"


def test_the_lives_of_a_run_stand_one_after_another(tmp_path: Path) -> None:
    write_run(tmp_path / "later")
    write_killed_run(tmp_path / "run", until(16.0))
    (tmp_path / "later" / "trace.json").rename(tmp_path / "run" / "trace-2.json")
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
    trace = (tmp_path / "trace.json").read_bytes()
    (tmp_path / "trace.json").write_bytes(trace[: trace.rindex(b'{"name"') + 30])
    payload = payload_of(tmp_path)
    assert [(each["file"], each["line"], each["problem"]) for each in payload["defects"]] == [
        ("trace.json", trace.count(b"\n") - 1, "the file ends within this line"),
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
    with pytest.raises(ConfigError, match=r"it has neither trace.json nor metrics.jsonl"):
        open_runs([tmp_path])


def test_an_empty_run_is_an_empty_page(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    run = RunView(tmp_path, "empty")
    run.update()
    payload = run.payload(Have())
    assert payload["engines"] == [] and payload["rows"] == [] and payload["bubbles"] == [[], [], [], []]
