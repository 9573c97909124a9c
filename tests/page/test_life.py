from pathlib import Path

from page_story import until, write_killed_run, write_run
from record_story import make_group, pipelined_round

from tailrace.page.bubbles import Bubble, bubbles
from tailrace.page.life import Life, Request, Straggler, Work
from tailrace.record.events import ControllerLag, EngineStateChanged, RequestStarted, RoundStarted, Waiting
from tailrace.record.trace import TraceWriter


def life_of(folder: Path) -> Life:
    life = Life(folder / "trace.json", 0.0)
    life.update()
    return life


def test_the_requests_of_a_round(tmp_path: Path) -> None:
    life = life_of(write_run(tmp_path))
    assert life.requests[2:] == [
        Request("engine-0", 1, 2.0, 7.0, "stop", "1.0/0", 10, 0),
        Request("engine-0", 2, 4.0, 10.0, "length", "1.0/1", 20, 0),
    ]
    assert [work[:3] for work in life.rounds] == [("round 0", 0.0, 15.0)]
    assert life.end_s == 15.0


def test_the_bubbles_of_a_round(tmp_path: Path) -> None:
    """The drawing of record_story, ten seconds earlier."""
    assert bubbles(life_of(write_run(tmp_path)).activity()) == [
        Bubble("trainer", 0.0, 4.0, "generation"),
        Bubble("trainer", 6.0, 7.0, "generation"),
        Bubble("trainer", 7.0, 10.0, "tail"),
        Bubble("trainer", 14.0, 15.0, "publication"),
        Bubble("engine-0", 10.0, 14.0, "weights"),
        Bubble("engine-0", 14.0, 15.0, "publication"),
    ]


def test_the_sample_that_ends_last_is_the_straggler_of_its_round(tmp_path: Path) -> None:
    story = pipelined_round(round=1, start_s=40.0, story=pipelined_round())
    assert life_of(write_run(tmp_path, story)).stragglers == [
        Straggler("round 0", "1.0/1", "engine-0", 2, 10.0, 20, 3.0),
        Straggler("round 1", "3.0/1", "engine-0", 2, 40.0, 20, 3.0),
    ]


def test_a_killed_run_shows_what_had_not_ended(tmp_path: Path) -> None:
    """Killed after the step at 16 s, when one request ran since 12 s and one since 14 s."""
    life = life_of(write_killed_run(tmp_path / "run", until(16.0)))
    assert life.unfinished == [
        Request("engine-0", 1, 2.0, 6.0, "unfinished", "1.0/0", 0, 0),
        Request("engine-0", 2, 4.0, 6.0, "unfinished", "1.0/1", 0, 0),
    ]
    assert [work[:3] for work in life.open_rounds] == [("round 0", 0.0, 6.0)]
    assert [bubble for bubble in bubbles(life.activity()) if bubble.lane == "engine-0"] == []


def test_a_life_grows_with_its_file(tmp_path: Path) -> None:
    writer, life = TraceWriter(tmp_path / "trace.json"), Life(tmp_path / "trace.json", 100.0)
    assert life.update() is True and life.requests == []
    story = pipelined_round()
    for event in story.events:
        writer.on(event)
        life.update()
    writer.close()
    life.update()
    assert [request.sample for request in life.requests] == ["0.0/0", "0.0/1", "1.0/0", "1.0/1"]
    assert (life.requests[0].start_s, life.end_s, life.unfinished) == (100.0, 115.0, [])
    assert life.update() is False


def test_what_the_trainer_computes_now_is_no_idle_time(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", waits=lambda: {"trainer: Step": 12.0, "the pool": 11.0})
    for event in (RoundStarted(10.0, 0, 0), ControllerLag(15.0, 0.0)):
        writer.on(event)
    life = life_of(tmp_path)
    assert life.open_waits == [Work("trainer: Step", 2.0, 5.0), Work("the pool", 1.0, 5.0)]
    assert bubbles(life.activity()) == [Bubble("trainer", 0.0, 2.0, "unknown")]
    writer.close()


def test_engines_that_sleep_or_die_and_long_waits_are_found(tmp_path: Path) -> None:
    sample = make_group(5, [3], [1.0]).samples[0]
    writer = TraceWriter(tmp_path / "trace.json")
    for event in (
        RoundStarted(10.0, 0, 0),
        RequestStarted(10.0, sample.id, "engine-0", 0),
        EngineStateChanged(12.0, "engine-1", "asleep", "lent"),
        EngineStateChanged(13.0, "engine-1", "dead", "signal SIGKILL"),
        Waiting(20.0, 10.0, "the schedule waits for a group"),
    ):
        writer.on(event)
    life = life_of(tmp_path)
    writer.close()
    activity = life.activity()
    assert activity.asleep["engine-1"].tolist() == [[2.0, 3.0]]
    assert activity.dead["engine-1"].tolist() == [[3.0, 10.0]]
    assert [tuple(wait) for wait in life.waits] == [
        (10.0, "no optimizer step for 10 s", "the schedule waits for a group")
    ]
