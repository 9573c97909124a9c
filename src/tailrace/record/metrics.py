"""metrics.jsonl: one JSON object an optimizer step, one an evaluation. `rows.py` has the keys.

The figures of a round, under "round/", are in the object of its last step. An object is written and flushed
once the next step, the round's end or an evaluation completes it, so the file of a killed run is good up to
its last line. A number that is not finite is null.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tailrace.record.events import Event
from tailrace.record.rows import ClosingRow, Counts, EvaluationRow, RoundRow, Row, StepRow, from_json, to_json


def read_rows(path: Path, *, before_round: int | None = None) -> list[Row]:
    """The rows of a metrics file in their order; none if there is no file. A torn last line is left out.

    Args:
        path: the file.
        before_round: leave out the rows of this round and of later ones.
    """
    return [row for line in _lines(path, before_round) for row in from_json(msgspec.json.decode(line))]


def _lines(path: Path, before_round: int | None) -> Iterator[bytes]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            round = msgspec.json.decode(line)["round"]
        except msgspec.DecodeError:
            return
        if before_round is None or round < before_round:
            yield line


class MetricsWriter:
    """Sink: appends rows to metrics.jsonl. Opened at a resume, it first removes the rows to be written
    again."""

    def __init__(self, path: Path, *, first_round: int = 0) -> None:
        """
        Args:
            path: the file.
            first_round: the round that comes first; rows of it and of later ones are removed.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"".join(line + b"\n" for line in _lines(path, first_round)))
        partial.replace(path)
        self._file = path.open("ab")
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
        self._file.close()

    def _write_last(self, round: dict[str, float | None] | None = None) -> None:
        if self._last:
            self._write(to_json(self._last) | (round or {}))
            self._last = None

    def _write(self, row: dict[str, float | None]) -> None:
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()
