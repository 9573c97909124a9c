"""events.jsonl: what is written is read back, while it grows, after a resume, and where it is damaged."""

import json
import resource
import signal
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
from msgspec.structs import replace

from helpers.record_story import make_group, pipelined_round, play
from helpers.virtual import SCHEDULES_BY_NAME, simulate
from tailrace.contracts.trainer import StepStats
from tailrace.errors import ConfigError
from tailrace.record.events import (
    Accumulated,
    BooksClosed,
    ControllerLag,
    EssTaken,
    Evaluated,
    EvaluatedSample,
    Event,
    OpenWaits,
    OptimizerStep,
    RoundStarted,
    RunStarted,
    SampleScored,
    Stepped,
    logged,
)
from tailrace.record.run_log import FORMAT, LogReader, LogWriter
from tailrace.types import SampleId


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def write(path: Path, *events: Event, life: int = 1) -> None:
    writer = LogWriter(path, life=life)
    for event in events:
        writer.on(event)
    writer.close()


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        list(LogReader(path).read())
    return str(refused.value)


def test_the_events_of_a_real_schedule_are_read_back(path: Path) -> None:
    outcome = simulate(SCHEDULES_BY_NAME["april"])
    write(path, *outcome.events)
    start, *events = LogReader(path).read()
    assert start == RunStarted(0.0, 1, 0, 0, 0, FORMAT)
    assert events == [each for each in map(logged, outcome.events) if each]
    assert len([each for each in events if isinstance(each, OptimizerStep)]) == len(outcome.of(Stepped))
    assert isinstance(events[-1], BooksClosed)


def test_a_line_is_an_object_with_the_name_of_its_event(path: Path) -> None:
    write(path, SampleScored(2.0, SampleId(7, 0, 1), 0.5, None, 9))
    _, scored = map(json.loads, path.read_text().splitlines())
    assert scored == {
        "event": "SampleScored", "time_s": 2.0, "sample": [7, 0, 1],
        "reward": 0.5, "failure": None, "num_tokens": 9, "detail": "",
    }  # fmt: skip


def test_what_other_files_have_is_left_out(path: Path) -> None:
    """Texts of evaluated samples are in samples/, figures in metrics.jsonl. An infinite loss is null."""
    sample = EvaluatedSample.of(make_group(-1, [3], [1.0]).samples[0], 1.0)
    (step,) = (
        each for each in pipelined_round().events if isinstance(each, Stepped) and each.start_s == 15.0
    )
    stats = StepStats(num_steps=1, samples=step.stats.samples, num_tokens=10, compute_s=1.0, loss=inf)
    events = [
        Evaluated(1.0, 0, 1, 1.0, 3.0, (sample,)),
        EssTaken(2.0, 0.5),
        Stepped(15.0, 16.0, stats, step.lags, step.samples),
    ]
    play(events, LogWriter(path))
    _, evaluated, stepped = LogReader(path).read()
    assert evaluated == Evaluated(0.0, 0, 1, 1.0, 3.0)
    assert stepped == OptimizerStep(14.0, 15.0, 1, stats.samples, 10, None)


def test_a_reader_follows_a_growing_log(path: Path) -> None:
    reader, writer, found = LogReader(path), LogWriter(path), list[object]()
    assert list(reader.read()) == []
    for event in pipelined_round().events:
        writer.on(event)
        found += reader.read()
    writer.close()
    assert [*found, *reader.read()] == list(LogReader(path).read())
    assert list(reader.read()) == []


def test_a_reader_decodes_only_what_was_appended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, RoundStarted(1.0, 0, 0))
    reader = LogReader(path)
    list(reader.read())
    content = path.read_bytes()
    path.write_bytes(b" " * content.index(b"\n") + content[content.index(b"\n") :])  # the first line is gone
    write(path, RoundStarted(9.0, 3, 3), life=2)
    assert [type(each) for each in reader.read()] == [RunStarted, RoundStarted]


def test_a_resumed_run_says_from_where_it_goes_on_and_keeps_what_was_written(path: Path) -> None:
    """The clock of the second process has another origin. Its first event follows the last one at once."""
    write(path, RoundStarted(100.0, 0, 0), ControllerLag(107.0, 1.0))
    before = path.read_bytes()
    writer = LogWriter(path, life=2, round=3, version=4, step=5)
    writer.on(RoundStarted(20.0, 3, 4))
    writer.on(Accumulated(21.0, 23.0, (), 9))
    writer.close()
    assert path.read_bytes().startswith(before)
    assert list(LogReader(path).read())[3:] == [
        RunStarted(7.0, life=2, round=3, version=4, step=5, format=FORMAT),
        RoundStarted(7.0, 3, 4),
        Accumulated(8.0, 10.0, (), 9),
    ]


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_process(path: Path) -> None:
    write(path, RoundStarted(1.0, 0, 0), RoundStarted(2.0, 1, 1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    reader = LogReader(path)
    assert [type(each) for each in reader.read()] == [RunStarted, RoundStarted]
    assert reader.is_torn
    write(path, RoundStarted(1.0, 1, 1), life=2)
    assert [type(each) for each in reader.read()] == [RunStarted, RoundStarted]
    assert not reader.is_torn and len(path.read_bytes().splitlines()) == 4


def test_a_log_that_is_torn_in_its_first_line_is_empty(path: Path) -> None:
    path.write_bytes(b'{"event":"RunSta')
    assert list(LogReader(path).read()) == []
    write(path, RoundStarted(1.0, 0, 0))
    assert [type(each) for each in LogReader(path).read()] == [RunStarted, RoundStarted]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            b'{"event":"RoundStarted","time_s":',
            "line 2 of events.jsonl: it is no event of this version (Input",
        ),
        (b'{"event":"Sang","time_s":1.0}', "Invalid value 'Sang'"),
        (b'{"event":"RoundStarted","time_s":1.0}', "Object missing required field `round`"),
        (b"\xff\xfe\x00", "line 2 of events.jsonl: it is no event of this version"),
        (
            b'{"event":"RoundStarted","time_s":-5.0,"round":0,"version":0}',
            "line 2 of events.jsonl: its time is before",
        ),
    ],
)
def test_a_bad_line_is_refused_with_its_number(path: Path, line: bytes, problem: str) -> None:
    write(path, RoundStarted(1.0, 0, 0), RoundStarted(2.0, 1, 1))
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], line, *lines[2:], b""]))
    assert problem in refusal(path)


def test_a_log_of_another_format_or_without_a_beginning_is_refused(path: Path) -> None:
    write(path, RoundStarted(1.0, 0, 0))
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format":1', b'"format":9'))
    assert "line 1 of events.jsonl: the log has format 9, and this version reads format 1" in refusal(path)
    path.write_bytes(content.split(b"\n", 1)[1])
    assert "line 1 of events.jsonl: no RunStarted comes before it" in refusal(path)


def test_what_tasks_wait_for_is_written_when_it_changes(path: Path) -> None:
    waits = {"the pool": 10.5}
    writer = LogWriter(path, waits=lambda: waits)
    for time_s in (10.0, 13.0, 16.0):
        writer.on(ControllerLag(time_s, 0.0))
    waits["trainer: Step"] = 17.0
    writer.on(ControllerLag(19.0, 0.0))
    found = [each for each in LogReader(path).read() if isinstance(each, OpenWaits)]
    assert found == [
        OpenWaits(3.0, {"the pool": 0.5}),
        OpenWaits(9.0, {"the pool": 0.5, "trainer: Step": 7.0}),
    ]
    writer.close()


def test_a_live_run_is_written_every_two_seconds_and_small_lags_only_then(path: Path) -> None:
    writer = LogWriter(path)
    sizes = []
    for half in range(10):
        writer.on(ControllerLag(100 + half / 2, 0.2 if half == 6 else 0.001))
        sizes.append(path.stat().st_size)
    assert sizes[3] == 0 < sizes[4] == sizes[7] < sizes[8]
    writer.close()
    lags = [each for each in LogReader(path).read() if isinstance(each, ControllerLag)]
    assert [each.time_s for each in lags] == [2.0, 3.0, 4.0]


WRITES = """
import signal, sys
from pathlib import Path
from tailrace.record.events import RoundStarted
from tailrace.record.run_log import LogWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer, round = LogWriter(Path(sys.argv[1])), 0
try:
    while True:
        writer.on(RoundStarted(float(round), round, round))
        round += 1
except OSError as why:
    print(why.strerror)
"""


def test_a_disk_that_is_full_ends_the_writer_and_leaves_whole_events(path: Path) -> None:
    """A limit on the size of a file stands for a full disk."""
    limit = 200_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    words = [sys.executable, "-c", WRITES, str(path)]
    done = subprocess.run(words, preexec_fn=limited, capture_output=True, text=True, timeout=60)
    assert "File too large" in done.stdout and path.stat().st_size == limit
    reader = LogReader(path)
    _, *rounds = reader.read()
    assert [each.round for each in rounds if isinstance(each, RoundStarted)] == list(range(len(rounds)))
    assert len(rounds) > 1000 and reader.is_torn


KILLED = """
import sys
from pathlib import Path
from tailrace.record.events import RoundStarted
from tailrace.record.run_log import LogWriter
writer, round = LogWriter(Path(sys.argv[1])), 0
while True:
    writer.on(RoundStarted(float(round), round, round))
    round += 1
    if round % 10_000 == 0:
        print(round, flush=True)
"""


def test_the_log_of_a_killed_process_is_read_to_its_last_whole_event(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    assert process.stdout
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, *rounds = LogReader(path).read()
    assert len(rounds) > 40_000
    assert rounds[-1] == replace(
        rounds[0], time_s=len(rounds) - 1.0, round=len(rounds) - 1, version=len(rounds) - 1
    )


def test_a_file_that_was_written_again_is_noticed(path: Path) -> None:
    reader = LogReader(path)
    assert not reader.was_replaced()
    write(path, RoundStarted(1.0, 0, 0))
    assert len(list(reader.read())) == 2 and not reader.was_replaced()
    path.unlink()
    assert reader.was_replaced()
    write(path, RoundStarted(1.0, 7, 0), RoundStarted(2.0, 8, 0))
    assert reader.was_replaced()
