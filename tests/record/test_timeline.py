import sys
from pathlib import Path

import pytest
from record_story import make_group, pipelined_round, play

from tailrace.record.draw import draw
from tailrace.record.events import RequestEnded, RoundStarted
from tailrace.record.timeline import RequestBar, RoundSpan, Timeline, TrainerBar


def test_bars_are_counted_from_the_first_rounds_start() -> None:
    play(pipelined_round().events, timeline := Timeline())
    assert timeline.requests == [
        RequestBar("engine-0", 0, 0, 0.0, 2.0),
        RequestBar("engine-0", 1, 0, 0.0, 4.0),
        RequestBar("engine-0", 0, 1, 2.0, 7.0),
        RequestBar("engine-0", 1, 1, 4.0, 10.0),
    ]
    assert timeline.trainer == [
        TrainerBar(1, 4.0, 5.0),
        TrainerBar(1, 5.0, 6.0),
        TrainerBar(2, 10.0, 12.0),
        TrainerBar(2, 12.0, 14.0),
    ]
    assert timeline.rounds == [RoundSpan(0.0, 15.0)]
    assert timeline.steps == {0: 1, 1: 2}


def test_an_evaluation_has_no_bars() -> None:
    story = pipelined_round()
    story.request(make_group(-1, [9], [1.0]).samples[0], 3, 9)
    play(story.events, timeline := Timeline())
    assert {bar.prompt for bar in timeline.requests} == {0, 1}


def test_a_picture_of_two_runs_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    story = pipelined_round()
    pipelined_round(story, round=1, start_s=40.0)
    story.request(make_group(9, [5], [1.0]).samples[0], 41, 43, engine="engine-1")
    timelines = {"two rounds": Timeline(), "one round": Timeline(), "nothing": Timeline()}
    play(story.events, timelines["two rounds"])
    play(pipelined_round().events, timelines["one round"])
    path = tmp_path / "timeline.png"
    assert draw(timelines, path) == f"timeline  {path}"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_round_in_which_no_request_both_began_and_ended_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    events = [event for event in pipelined_round().events if not isinstance(event, RequestEnded)]
    play(events, timeline := Timeline())
    draw({"outlived": timeline}, tmp_path / "timeline.png")
    assert timeline.requests == [] and (tmp_path / "timeline.png").exists()


def test_without_a_finished_round_there_is_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = draw({"nothing": Timeline()}, tmp_path / "timeline.png")
    assert line == "timeline.png not drawn: no round was finished"
    assert not (tmp_path / "timeline.png").exists()


def test_without_matplotlib_one_line_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    play(pipelined_round().events, timeline := Timeline())
    line = draw({"serial": timeline}, tmp_path / "timeline.png")
    assert line == "timeline.png not drawn: pip install 'tailrace[pictures]'"
    assert not (tmp_path / "timeline.png").exists()


def test_the_waits_in_the_picture_are_those_of_the_round() -> None:
    pytest.importorskip("matplotlib")
    from tailrace.record.pictures import _waits

    story = pipelined_round()
    pipelined_round(story, round=1, start_s=40.0)
    play(story.events, timeline := Timeline())
    assert [wait for wait in _waits(timeline) if wait[1] > wait[0]] == [(0, 4), (6, 10), (30, 34), (36, 40)]


def test_the_last_rounds_are_kept_wherever_the_run_ends() -> None:
    story = pipelined_round()
    for round in (1, 2, 3):
        pipelined_round(story, round=round, start_s=10.0 + 100 * round)
    story.tell(RoundStarted(410.0, 4, 4))
    story.train(make_group(8, [4, 6], [1.0, 0.0]), 411, 412, 413)  # interrupted in the fifth round
    play(story.events, timeline := Timeline(max_rounds=2))
    assert timeline.rounds == [RoundSpan(0.0, 15.0), RoundSpan(100.0, 115.0)]
    assert [report["round"] for report in timeline.reports] == [2, 3]
    assert timeline.trainer[0] == TrainerBar(5, 4.0, 5.0) and timeline.trainer[-1].end_s == 114.0
    assert timeline.requests[0] == RequestBar("engine-0", 0, 4, 0.0, 2.0) and len(timeline.requests) == 8
