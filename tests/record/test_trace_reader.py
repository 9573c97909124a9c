import json
from pathlib import Path

import pytest
from record_story import pipelined_round, play

from tailrace.record.trace import FORMAT, FORMAT_RECORD, RUN_PID, TraceWriter
from tailrace.record.trace_file import TraceFile
from tailrace.record.trace_reader import Defect, TraceReader

HEADER = {"name": FORMAT_RECORD, "ph": "M", "pid": 1, "tid": 0, "args": {"format": FORMAT}}


def slice_at(ts: int, dur: int = 1) -> dict[str, object]:
    return {"name": f"s{ts}", "ph": "X", "pid": 2, "tid": 1, "ts": ts, "dur": dur, "args": {}}


def write(path: Path, *lines: object) -> TraceReader:
    text = [line if isinstance(line, str) else json.dumps(line) for line in (HEADER, *lines)]
    path.write_text("[\n" + ",\n".join(text) + "\n]\n")
    return TraceReader(path)


def starts(reader: TraceReader) -> list[int]:
    """Of the slices that are new."""
    return [record.ts for record in reader.read() if record.ph == "X"]


def test_every_record_is_read_once_while_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file, reader = TraceFile(path, max_bytes=2**20), TraceReader(path)
    read = []
    file.put_header(HEADER)
    for ts in range(5):
        file.put(slice_at(ts))
        file.flush([slice_at(100 + ts) | {"ph": "B"}] * (5 - ts))
        read.append(starts(reader))
        assert [record.ts for record in reader.unfinished] == [100 + ts] * (5 - ts)
        assert len(json.loads(path.read_text())) == ts + 2 + 5 - ts
    file.close()
    assert read == [[0], [1], [2], [3], [4]]
    assert reader.read() == [] and reader.unfinished == [] and reader.defects == []
    assert len(json.loads(path.read_text())) == 6


def test_what_has_begun_is_in_one_file_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, max_bytes=1000)
    for ts in range(20):
        file.put(slice_at(ts))
        file.flush([slice_at(100) | {"ph": "B"}])
    file.close()
    parts = [json.loads(part.read_text()) for part in [path, *tmp_path.glob("trace.*.json")]]
    assert len(parts) == 2 and all(part[-1]["ph"] == "X" for part in parts)
    assert all(part.stat().st_size <= 1000 for part in tmp_path.glob("trace*.json"))


def test_a_trace_of_several_files_is_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file, reader = TraceFile(path, max_bytes=1000), TraceReader(path)
    read: list[int] = []
    for ts in range(60):
        file.put(slice_at(ts))
        file.flush()
        if ts % 5 == 0:
            read += starts(reader)
    file.close()
    read += starts(reader)
    assert read == list(range(60)) and reader.gaps == []
    late = TraceReader(path)
    kept = starts(late)
    ((end, start),) = late.gaps
    assert kept == [*range(end), *range(start, 60)]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ('{"name": "s2", "ph', "it is no trace event"),
        ('{"name": 3}', "it is no trace event"),
        ('"\\ud800"', "it is no trace event"),
        (slice_at(1) | {"args": {"tokens": "5"}}, "it is no trace event"),
        (slice_at(1, dur=-5), "its time is negative"),
    ],
)
def test_a_bad_line_is_named_and_left_out(tmp_path: Path, bad: object, problem: str) -> None:
    reader = write(tmp_path / "trace.json", slice_at(0), bad, bad, slice_at(9))
    assert starts(reader) == [0, 9]
    assert reader.defects == [Defect("trace.json", 4, problem, num_lines=2)]
    assert reader.read() == []


def test_a_torn_file_is_read_up_to_the_torn_line_and_beyond_it_later(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    reader = write(path, slice_at(0), slice_at(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert starts(reader) == [0]
    assert reader.defects == [Defect("trace.json", 4, "the file ends within this line")]
    with path.open("ab") as file:
        file.write(whole[-20:])
    assert starts(reader) == [2]
    assert reader.defects == []


def test_slices_out_of_order_are_named_and_kept(tmp_path: Path) -> None:
    reader = write(tmp_path / "trace.json", slice_at(5), slice_at(7), slice_at(3))
    assert starts(reader) == [5, 7, 3]
    problem = "it begins before the slice above it in its lane ends"
    assert reader.defects == [Defect("trace.json", 5, problem)]


def test_work_of_the_run_may_overlap_but_is_written_when_it_ends(tmp_path: Path) -> None:
    work = [slice_at(*times) | {"pid": RUN_PID} for times in ((0, 9), (3, 7), (2, 5))]
    reader = write(tmp_path / "trace.json", *work)
    assert starts(reader) == [0, 3, 2]
    assert reader.defects == [Defect("trace.json", 5, "it ends before the slice above it in its lane ends")]


def test_a_trace_without_a_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(f"[\n{json.dumps(slice_at(0))}\n]\n")
    reader = TraceReader(tmp_path / "trace.json")
    assert starts(reader) == [0]
    problem = "the trace has format none, and this version of tailrace reads format 1"
    assert reader.defects == [Defect("trace.json", 2, problem)]
    (tmp_path / "trace-2.json").touch()
    reader = TraceReader(tmp_path / "trace-2.json")
    assert reader.read() == [] and reader.defects == [Defect("trace-2.json", 1, "the file is empty")]


def test_another_format_is_named_and_read_as_far_as_it_can_be(tmp_path: Path) -> None:
    play(pipelined_round().events, TraceWriter(tmp_path / "trace.json"))
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "trace.json").write_text(text.replace('"format":1', '"format":7'))
    reader = TraceReader(tmp_path / "trace.json")
    assert any(record.name == "group 1" for record in reader.read())
    problem = "the trace has format 7, and this version of tailrace reads format 1"
    assert reader.defects == [Defect("trace.json", 2, problem)]


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\n")
    reader = TraceReader(tmp_path / "trace.json")
    assert reader.read() == [] and reader.defects[0].line == 1


def test_a_file_that_another_run_wrote_over_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    reader = write(path, slice_at(0))
    reader.read()
    assert not reader.was_replaced()
    write(tmp_path / "other.json", *map(slice_at, range(5, 9)))
    (tmp_path / "other.json").replace(path)
    assert reader.was_replaced()
