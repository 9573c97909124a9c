import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from record_story import pipelined_round

from tailrace.record.trace import TraceWriter
from tailrace.record.trace_file import TraceFile

WRITER = """
import sys, time
from pathlib import Path
from tailrace.record.trace_file import TraceFile
file = TraceFile(Path(sys.argv[1]), max_bytes=2**20)
print("started", flush=True)
n = 0
while True:
    for _ in range(20):
        file.put({"n": n})
        n += 1
    file.flush()
    time.sleep(0.0005)
"""


def test_the_file_is_valid_json_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, max_bytes=2**20)
    assert json.loads(path.read_text()) == []
    for n in range(3):
        file.put({"n": n})
        file.flush()
        assert json.loads(path.read_text()) == [{"n": m} for m in range(n + 1)]
    file.put({"n": 3})
    assert len(json.loads(path.read_text())) == 3
    file.close()
    assert len(json.loads(path.read_text())) == 4


def test_the_file_of_a_killed_process_is_valid_json(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / f"trace-{attempt}.json"
        process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
        try:
            assert process.stdout and process.stdout.readline() == b"started\n"
            size = path.stat().st_size
            while path.stat().st_size < size + 10_000 * (attempt + 1):
                pass
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        records = json.loads(path.read_text())
        assert records == [{"n": n} for n in range(len(records))] and len(records) > 500


def test_a_long_trace_goes_on_in_files_of_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    (tmp_path / "trace.7.json").write_text("of an earlier trace")
    (tmp_path / "trace-2.json").write_text("of another life")
    file = TraceFile(path, max_bytes=4096)
    file.put_header({"name": "lane"})
    for n in range(1000):
        file.put({"n": n})
    file.close()
    numbered = sorted(tmp_path.glob("trace.*.json"), key=lambda part: int(part.suffixes[0][1:]))
    parts = [path, *numbered]
    first, older, newest = (json.loads(part.read_text()) for part in parts)
    assert all(part.stat().st_size <= 4096 for part in parts)
    assert first[:2] == [{"name": "lane"}, {"n": 0}]
    assert older[0] == newest[0] == {"name": "lane"}
    assert older[-1]["n"] + 1 == newest[1]["n"] and newest[-1] == {"n": 999}
    assert (tmp_path / "trace-2.json").exists() and not (tmp_path / "trace.7.json").exists()


def test_every_file_of_a_trace_names_its_lanes(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", max_bytes=2048)
    for round in range(3):
        for event in pipelined_round(round=round, start_s=10.0 + 30 * round).events:
            writer.on(event)
    writer.close()
    parts = list(tmp_path.glob("trace.*.json"))
    assert len(parts) == 2
    for part in parts:
        records = json.loads(part.read_text())
        named = {(r["pid"], r["tid"]) for r in records if r["name"] == "thread_name"}
        assert {(r["pid"], r["tid"]) for r in records if r["ph"] == "X"} <= named
