"""A JSON array on disk that is complete after every flush, in files of bounded size."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

TAIL = b"\n]\n"
NUM_NEWEST = 2
FLUSH_BYTES = 32 * 1024


class TraceFile:
    """Writes records to trace.json, then to trace.1.json, trace.2.json, ... The first and the newest are kept.

    A flush is one write that begins where the array's end stands and brings a new end, so the file of a
    killed process parses.
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

    def flush(self) -> None:
        """Write all records to the file."""
        if not self._pending:
            return
        if self._end > 1 and self._end + self._num_pending_bytes + len(TAIL) > self._max_bytes:
            self._next_part()
        self._append(self._pending)
        self._pending, self._num_pending_bytes = [], 0

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _open(self) -> None:
        partial = self._path.with_suffix(".partial")
        self._file = partial.open("wb")
        self._write(b"[" + TAIL, 0)
        self._end = 1
        partial.replace(self._part_path(self._part))

    def _next_part(self) -> None:
        self._file.close()
        self._part += 1
        if (oldest := self._part - NUM_NEWEST) > 0:
            self._part_path(oldest).unlink(missing_ok=True)
        self._open()
        if self._headers:
            self._append(self._headers)

    def _part_path(self, part: int) -> Path:
        return self._path.with_suffix(f".{part}{self._path.suffix}") if part else self._path

    def _append(self, records: list[bytes]) -> None:
        data = (b",\n" if self._end > 1 else b"\n") + b",\n".join(records)
        self._write(data + TAIL, self._end)
        self._end += len(data)

    def _write(self, data: bytes, offset: int) -> None:
        self._file.seek(offset)
        self._file.write(data)
        self._file.flush()
