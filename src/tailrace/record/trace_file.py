"""A JSON array on disk that is complete after every flush, in files of bounded size."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

TAIL = b"\n]\n"
NUM_NEWEST = 2
FLUSH_BYTES = 32 * 1024


def first_files(folder: Path) -> list[Path]:
    """Return the first trace file of each life of a run, in their order."""
    later = folder.glob("trace-*.json")
    numbered = {int(n): path for path in later if (n := path.stem.removeprefix("trace-")).isdigit()}
    first = folder / "trace.json"
    return [*([first] if first.exists() else []), *(numbered[n] for n in sorted(numbered))]


class TraceFile:
    """Writes records to trace.json, then to trace.1.json, ... The first and the newest are kept.

    A flush is one write that begins where the array's end stands and brings a new end, so the file of a
    killed process parses. What follows the new end is blank until it is cut off.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """
        Args:
            path: the first file. Files of an earlier trace of this name are removed.
            max_bytes: the largest size of one file, unless a single flush is larger.
        """
        self._path, self._max_bytes = path, max_bytes
        self._headers: list[bytes] = []
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{path.stem}.*{path.suffix}"):
            if old.stem.removeprefix(f"{path.stem}.").isdigit():
                old.unlink()
        self._part = 0
        self._open()

    def put_header(self, record: Mapping[str, object]) -> None:
        """Write a record that every later file repeats: the name of a lane."""
        self._headers.append(msgspec.json.encode(record))
        self.put(record)

    def put(self, record: Mapping[str, object]) -> None:
        self._pending.append(msgspec.json.encode(record))
        self._num_pending_bytes += len(self._pending[-1]) + 2
        if self._num_pending_bytes >= min(FLUSH_BYTES, self._max_bytes // 4):
            self.flush()

    def flush(self, unfinished: Iterable[Mapping[str, object]] = ()) -> None:
        """Write all records to the file.

        Args:
            unfinished: records that end the array until the next flush replaces them: what has begun and not
                ended. Those beyond a quarter of the largest size are left out.
        """
        last = self._encoded(unfinished)
        if not self._pending and not last and not self._has_last:
            return
        num_bytes = self._num_pending_bytes + sum(len(record) + 2 for record in last) + len(TAIL)
        if self._end > 1 and self._end + num_bytes > self._max_bytes:
            self._next_part()
        self._append(self._pending, last)
        self._pending, self._num_pending_bytes = [], 0

    def _encoded(self, records: Iterable[Mapping[str, object]]) -> list[bytes]:
        encoded, num_bytes = [], 0
        for record in records:
            encoded.append(msgspec.json.encode(record))
            num_bytes += len(encoded[-1]) + 2
            if num_bytes > self._max_bytes // 4:
                return encoded[:-1]
        return encoded

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _open(self) -> None:
        partial = self._path.with_suffix(".partial")
        self._file = partial.open("wb")
        self._file.write(b"[" + TAIL)
        self._file.flush()
        self._end, self._length, self._has_last = 1, 1 + len(TAIL), False
        partial.replace(self._part_path(self._part))

    def _next_part(self) -> None:
        if self._has_last:
            self._append([])
        self._file.close()
        self._part += 1
        if (oldest := self._part - NUM_NEWEST) > 0:
            self._part_path(oldest).unlink(missing_ok=True)
        self._open()
        if self._headers:
            self._append(self._headers)

    def _part_path(self, part: int) -> Path:
        return self._path.with_suffix(f".{part}{self._path.suffix}") if part else self._path

    def _append(self, records: list[bytes], last: list[bytes] | None = None) -> None:
        data = b"".join(self._separator(number) + record for number, record in enumerate(records))
        start = len(records)
        end = b"".join(self._separator(start + n) + record for n, record in enumerate(last or ())) + TAIL
        length = self._end + len(data) + len(end)
        self._file.seek(self._end)
        self._file.write(data + end + b" " * (self._length - length))
        self._file.flush()
        if length < self._length:
            self._file.truncate(length)
        self._end, self._length, self._has_last = self._end + len(data), length, bool(last)

    def _separator(self, number: int) -> bytes:
        """What precedes the record with this number in a write."""
        return b",\n" if self._end > 1 or number else b"\n"
