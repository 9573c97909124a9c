"""The pictures of schedules: what a panel shows, and that one is drawn."""

from pathlib import Path

import pytest

from helpers.record_story import Story, make_group, pipelined_round
from tailrace.record.events import RequestEnded, RoundStarted

make_pictures = pytest.importorskip("make_pictures", reason="pip install 'tailrace[dev]'")


def panel_of(story: Story, max_rounds: int = 3) -> "make_pictures.Panel":
    sink = make_pictures.Collected()
    for event in story.events:
        sink.on(event)
    return make_pictures.Panel(sink.timeline, max_rounds)


def test_bars_are_counted_from_the_first_rounds_start() -> None:
    story = pipelined_round()
    story.request(make_group(-1, [9], [1.0]).samples[0], 11, 19)  # of an evaluation
    panel = panel_of(story)
    assert panel.requests == [
        ("engine-0", 1, 0, 0.0, 2.0),
        ("engine-0", 2, 0, 0.0, 4.0),
        ("engine-0", 1, 1, 2.0, 7.0),
        ("engine-0", 2, 1, 4.0, 10.0),
    ]
    work = [(1, 4.0, 5.0), (1, 5.0, 6.0), (2, 10.0, 12.0), (2, 12.0, 14.0)]
    assert [(each.step, each.start_s, each.end_s) for each in panel.work] == work
    assert panel.rounds == [(0.0, 15.0)] and panel.steps == {0: 1, 1: 2}
    assert panel.waiting_ratio == pytest.approx(8 / 14)


def test_the_last_rounds_are_kept_wherever_the_run_ends() -> None:
    story = pipelined_round()
    for round in (1, 2, 3):
        pipelined_round(story, round=round, start_s=10.0 + 100 * round)
    story.tell(RoundStarted(410.0, 4, 4))
    story.train(make_group(8, [4, 6], [1.0, 0.0]), 411, 412, 413)  # interrupted in the fifth round
    panel = panel_of(story, max_rounds=2)
    assert panel.rounds == [(0.0, 15.0), (100.0, 115.0)]
    assert (panel.work[0].step, panel.work[0].start_s, panel.trained_s) == (5, 4.0, 114.0)
    assert panel.requests[0] == ("engine-0", 1, 4, 0.0, 2.0) and len(panel.requests) == 8
    waits = [wait for wait in make_pictures._waits(panel) if wait[1] > wait[0]]
    assert waits == [(0, 4), (6, 10), (100, 104), (106, 110)]


def test_a_picture_of_two_runs_is_drawn(tmp_path: Path) -> None:
    story = pipelined_round()
    pipelined_round(story, round=1, start_s=40.0)
    unanswered = Story([event for event in pipelined_round().events if not isinstance(event, RequestEnded)])
    panels = {"two rounds": panel_of(story), "no request ended": panel_of(unanswered)}
    make_pictures.draw_panels(panels, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
