"""metrics.jsonl: one JSON object an optimizer step, one an evaluation. `rows.py` has the keys.

The figures of a round, under "round/", are in the object of its last step. An object is written and flushed
once the next step, the round's end or an evaluation completes it, so the file of a killed run is good up to
its last line. A number that is not finite is null.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tailrace.errors import ConfigError
from tailrace.record.events import Event
from tailrace.record.rows import ClosingRow, Counts, EvaluationRow, RoundRow, Row, StepRow, from_json, to_json


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics file in their order; none if there is no file.

    Raises:
        ConfigError: a line is damaged.
    """
    rows: list[Row] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            rows += from_json(msgspec.json.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, ValueError) as why:
            raise damaged_line(path, line, why) from None
    return rows


def damaged_line(path: Path, line: bytes, why: Exception) -> ConfigError:
    """The error of a line that cannot be read or lacks what it must have."""
    problem = f"it has a damaged line ({type(why).__name__}: {why}): {line[:80]!r}"
    return ConfigError("--output-dir", str(path), problem, "put a copy back, or delete that line")


class JoinedRows:
    """Sink: gives the rows as flat objects, a step and its round's end in one.

    Args:
        write: takes each object when it is complete.
    """

    def __init__(self, write: Callable[[dict[str, float | None]], None]) -> None:
        self._write = write
        self._last: StepRow | None = None
        """The last step's row, until it is known whether it ends its round."""

    def on(self, event: Event) -> None:
        match event:
            case StepRow():
                self._write_last()
                self._last = event
            case RoundRow() if self._last:
                # One object has both rows, so their counts are added up.
                self._last = replace(self._last, counts=self._last.counts.plus(event.counts))
                self._write_last(to_json(replace(event, counts=Counts())))
            case EvaluationRow() | ClosingRow():
                self._write_last()
                self._write(to_json(event))

    def close(self) -> None:
        self._write_last()

    def _write_last(self, round: dict[str, float | None] | None = None) -> None:
        if self._last:
            self._write(to_json(self._last) | (round or {}))
            self._last = None


class MetricsWriter(JoinedRows):
    """Sink: appends rows to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        super().__init__(self._append)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def close(self) -> None:
        super().close()
        self._file.close()

    def _append(self, row: dict[str, float | None]) -> None:
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()
