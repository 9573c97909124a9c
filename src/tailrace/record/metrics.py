"""metrics.jsonl: one JSON object an optimizer step, one an evaluation. `steps.py` names the keys.

Rows are written and flushed as their step is complete, so the file of a killed run is good up to its
last line. A number that is not finite is written as null.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tailrace.record.events import Event
from tailrace.record.steps import Row, StepMeter


def read_rows(path: Path, *, before_round: int | None = None) -> Iterator[Row]:
    """The rows of a metrics file, of earlier rounds only if asked. A torn last line is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            row = msgspec.json.decode(line, type=dict[str, int | float | None])
        except msgspec.DecodeError:
            return
        round = row["round"]
        if before_round is None or (round is not None and round < before_round):
            yield {key: float("nan") if value is None else value for key, value in row.items()}


class MetricsWriter:
    """Sink: appends to metrics.jsonl; opened at a resume, it first removes what will happen again."""

    def __init__(self, path: Path, *, first_round: int = 0) -> None:
        """first_round: the round that comes first; rows of it and of later ones are removed."""
        kept = list(read_rows(path, before_round=first_round))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in kept))
        partial.replace(path)
        self._file = path.open("ab")
        self._meter = StepMeter(self._write, step=int(kept[-1]["step"]) if kept else 0)

    def on(self, event: Event) -> None:
        self._meter.on(event)

    def close(self) -> None:
        self._meter.close()
        self._file.close()

    def _write(self, row: Row) -> None:
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()
