"""Takes out of the records of a run what a resumed run does again.

A run goes on from a checkpoint. It repeats everything after the checkpoint: later rounds, and the later
optimizer steps of the checkpoint's round.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tailrace.record.figures import RENAMED
from tailrace.record.metrics import damaged_line
from tailrace.record.samples import files_by_round


def rewind_records(metrics: Path, samples: Path, *, round: int, step: int) -> None:
    """Keep the rows and samples of earlier rounds, and those of this round up to an optimizer step. The file
    and the folder need not exist. Raises a ConfigError if a line is damaged or lacks what it must have."""
    evaluated: set[int] = set()

    def is_kept(row: Mapping[str, Any]) -> bool:
        kept = row["round"] < round or row["step"] < step or ("loss" in row and row["step"] == step)
        if kept and row.keys() & {"eval/reward", *RENAMED}:
            evaluated.add(int(row["round"]))
        return bool(kept)

    if metrics.exists():
        _filter(metrics, is_kept)
    for number, path in files_by_round(samples).items():
        if number == round:
            _filter(path, lambda record: bool(record["step"] <= step))
        elif number > round:
            path.unlink()
    for number, path in files_by_round(samples / "eval").items():
        if number >= round and number not in evaluated:
            path.unlink()


def _filter(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drop lines, and the file if none is left. A last line that a kill cut short is dropped, too."""
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            is_kept = keep(msgspec.json.decode(line))
        except (KeyError, TypeError, ValueError, RecursionError) as why:
            if not line.endswith(b"\n"):
                break
            raise damaged_line(path, line, why) from None
        if is_kept:
            kept.append(line)
    if not kept:
        path.unlink()
        return
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(kept))
    partial.replace(path)
