"""metrics.jsonl: one JSON object an optimizer step, one an evaluation. `figures.py` has the keys.

The figures of a round, under "round/", are in the object of its last step. An object is written and flushed
once the next step, the round's end or an evaluation completes it, so the file of a killed run is good up to
its last line. A number that is not finite is null.
"""

from collections.abc import Callable
from math import nan
from pathlib import Path

import msgspec

from tailrace.errors import ConfigError
from tailrace.record.events import Event, Row
from tailrace.record.figures import RENAMED, joined

_DECODER = msgspec.json.Decoder(dict[str, int | float | None])


def read_row(line: bytes) -> Row:
    """The figures of a line, under the names of this release. Raises ValueError or LookupError if it is
    damaged."""
    row = {
        RENAMED.get(name, name): nan if value is None else value
        for name, value in _DECODER.decode(line).items()
    }
    if not row.keys() >= {"step", "round"}:
        raise LookupError("it has no step or no round")
    return row


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics file in their order, one a line; none if there is no file. Raises a ConfigError
    if a line is damaged."""
    rows: list[Row] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            rows.append(read_row(line))
        except (ValueError, LookupError) as why:
            raise damaged_line(path, line, why) from None
    return rows


def damaged_line(path: Path, line: bytes, why: Exception) -> ConfigError:
    """The error of a line that cannot be read or lacks what it must have."""
    problem = f"it has a damaged line ({type(why).__name__}: {why}): {line[:80]!r}"
    return ConfigError("--output-dir", str(path), problem, "put a copy back, or delete that line")


class JoinedRows:
    """Sink: gives each row that is complete to a function, as it is in metrics.jsonl: a step and its round's
    end in one."""

    def __init__(self, write: Callable[[Row], None]) -> None:
        self._write = write
        self._last: Row | None = None
        """The last step's row, until it is known whether it ends its round."""

    def on(self, event: Event) -> None:
        match event:
            case dict() if "loss" in event:
                self._write_last()
                self._last = event
            case dict() if "round/time_s" in event:
                self._last = joined(self._last, event) if self._last else None
                self._write_last()
            case dict():
                if "eval/reward" not in event:  # an evaluation may end while the last step's round goes on
                    self._write_last()
                self._write(event)

    def close(self) -> None:
        self._write_last()

    def _write_last(self) -> None:
        if self._last:
            self._write(self._last)
            self._last = None


class MetricsWriter(JoinedRows):
    """Sink: appends rows to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        super().__init__(self.append)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def close(self) -> None:
        super().close()
        self._file.close()

    def append(self, row: Row) -> None:
        """Write a complete row."""
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()
