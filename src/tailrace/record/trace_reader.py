"""Reads a trace while it is written, or after its writer was killed."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tailrace.record.trace import FORMAT, FORMAT_RECORD, RUN_PID


class Record(msgspec.Struct, frozen=True):
    """One trace event; trace.py says which there are. Times are microseconds."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: int = 0
    dur: int = 0
    args: dict[str, Any] = {}

    @property
    def end(self) -> int:
        return self.ts + self.dur


class Defect(msgspec.Struct, frozen=True):
    """The first line of a file that has a problem, and the number of all such lines."""

    file: str
    line: int
    problem: str
    num_lines: int = 1


class Line(NamedTuple):
    number: int
    """From 1."""
    content: bytes
    start: int
    """Where it begins in the file."""
    end: int
    """Where its content ends, without a comma."""
    is_whole: bool
    """Another line follows it."""


class LineFile:
    """The lines of a file that grows.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._number = 0, 1
        self._accepted = b""
        """The last line that was accepted."""
        self._version: tuple[int, ...] = ()

    def lines(self) -> Iterator[Line]:
        """Yield the lines with content from the last `accept` on."""
        data = self._read()
        start, number = self._offset, self._number
        *whole, last = data.split(b"\n")
        for raw, is_whole in [*((each, True) for each in whole), (last, False)]:
            content = raw.strip().rstrip(b",")
            end = start + len(raw.rstrip().rstrip(b","))
            if content:
                yield Line(number, content, end - len(content), end, is_whole)
            start, number = start + len(raw) + 1, number + 1

    def is_empty(self) -> bool:
        return self._version[1:2] == (0,)

    def accept(self, line: Line) -> None:
        """Do not yield this line and those before it again."""
        self._offset, self._number, self._accepted = line.end, line.number, line.content

    def was_replaced(self) -> bool:
        """Whether the last line that was accepted is no longer where it was."""
        try:
            if not self._accepted or _version(self.path.stat()) == self._version:
                return False
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._accepted))
                return file.read(len(self._accepted)) != self._accepted
        except FileNotFoundError:
            return False

    def _read(self) -> bytes:
        """Read twice and compare, because the writer may change the end of the file in between."""
        data = self._once()
        while (again := self._once()) != data:
            data = again
        return data

    def _once(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                self._version = _version(os.fstat(file.fileno()))
                file.seek(self._offset)
                return file.read()
        except FileNotFoundError:
            return b""


def _version(found: os.stat_result) -> tuple[int, ...]:
    """What differs when a file was written again."""
    return found.st_ino, found.st_size, found.st_mtime_ns


class TraceReader:
    """Reads the trace of one life of a run: its first file and those in which it goes on.

    What cannot be read is left out, and `defects` says what that is.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the first file.
        """
        self.unfinished: list[Record] = []
        """What had begun and not ended when the trace was last written."""
        self.gaps: list[tuple[int, int]] = []
        """Ends and starts, in microseconds, between which files are no longer kept."""
        self._path = path
        self._parts: dict[int, LineFile] = {}
        self._begun: set[LineFile] = set()
        """Those of which a record was read."""
        self._ends: dict[tuple[int, int], int] = {}
        """When the last slice of a lane ended."""
        self._last_end = 0
        self._defects: dict[tuple[str, str], Defect] = {}
        self._torn: Defect | None = None

    @property
    def defects(self) -> Sequence[Defect]:
        return [*self._defects.values(), *([self._torn] if self._torn else [])]

    def was_replaced(self) -> bool:
        """Whether another run wrote its trace over what was read."""
        return any(part.was_replaced() for part in self._parts.values())

    def read(self) -> list[Record]:
        """The records that were written since the last call."""
        records: list[Record] = []
        for number in self._numbers():
            known = max(self._parts, default=None)
            if known is not None and number < known:
                continue
            if number not in self._parts:
                self._parts[number] = LineFile(self._part_path(number))
            begun = len(records)
            records += self._read(self._parts[number])
            if known is not None and number > known + 1:
                starts = [record.ts for record in records[begun:] if record.ph == "X"]
                self.gaps += [(self._last_end, min(starts))] if starts else []
            self._last_end = max([self._last_end, *(each.end for each in records[begun:] if each.ph == "X")])
        return records

    def _numbers(self) -> list[int]:
        found = self._path.parent.glob(f"{self._path.stem}.*{self._path.suffix}")
        numbers = [each.stem.removeprefix(f"{self._path.stem}.") for each in found]
        return [0, *sorted(int(number) for number in numbers if number.isdigit())]

    def _part_path(self, number: int) -> Path:
        return self._path.with_suffix(f".{number}{self._path.suffix}") if number else self._path

    def _read(self, part: LineFile) -> list[Record]:
        records: list[Record] = []
        self.unfinished, self._torn = [], None
        for line in part.lines():
            if line.content in (b"[", b"]"):
                continue
            record = self._record(part, line)
            if record and record.ph == "B":
                self.unfinished.append(record)
            elif not self.unfinished and (line.is_whole or record):
                part.accept(line)
                if record and self._is_readable(part, line, record):
                    records.append(record)
        if part.is_empty():
            self._torn = Defect(part.path.name, 1, "the file is empty")
        return records

    def _record(self, part: LineFile, line: Line) -> Record | None:
        try:
            record = msgspec.json.decode(line.content, type=Record)
            if not all(isinstance(record.args.get(name, 0), int) for name in ("tokens", "had")):
                raise msgspec.DecodeError
            return record
        except (msgspec.DecodeError, UnicodeDecodeError):
            if line.is_whole and not self.unfinished:
                self._defect(part, line, "it is no trace event")
            elif not line.is_whole:
                self._torn = Defect(part.path.name, line.number, "the file ends within this line")
            return None

    def _is_readable(self, part: LineFile, line: Line, record: Record) -> bool:
        """Whether the record means what it says, as far as can be told."""
        if part not in self._begun:
            self._begun.add(part)
            found = record.args.get("format") if record.name == FORMAT_RECORD else "none"
            if found != FORMAT:
                problem = f"the trace has format {found}, and this version of tailrace reads format {FORMAT}"
                self._defect(part, line, problem)
        if record.ph == "X":
            lane, is_run = (record.pid, record.tid), record.pid == RUN_PID
            # Work of the run may overlap. It is written when it ends.
            if (record.end if is_run else record.ts) < self._ends.get(lane, 0):
                problem = f"it {'ends' if is_run else 'begins'} before the slice above it in its lane ends"
                self._defect(part, line, problem)
            self._ends[lane] = max(record.end, self._ends.get(lane, 0))
        if record.dur < 0 or record.ts < 0:
            self._defect(part, line, "its time is negative")
            return False
        return True

    def _defect(self, part: LineFile, line: Line, problem: str) -> None:
        key = part.path.name, problem
        known = self._defects.get(key, Defect(part.path.name, line.number, problem, num_lines=0))
        self._defects[key] = msgspec.structs.replace(known, num_lines=known.num_lines + 1)
