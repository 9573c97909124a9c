"""Takes out of the records of a run what a resumed run does again.

A run goes on from a checkpoint. It repeats everything after the checkpoint: later rounds, and the later
optimizer steps of the checkpoint's round.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tailrace.record.metrics import damaged_line

SAMPLES = f"round_{'[0-9]' * 6}.jsonl"
"""The names of a run's files of samples, which copies of a user's own have not."""


def rewind_records(metrics: Path, samples: Path, *, round: int, step: int) -> None:
    """Keep the rows and samples of earlier rounds, and those of this round up to an optimizer step. The file
    and the folder need not exist. Raises a ConfigError if a line is damaged or lacks what it must have."""
    evaluated: set[str] = set()

    def is_kept(row: Mapping[str, Any]) -> bool:
        kept = row["round"] < round or row["step"] < step or ("loss" in row and row["step"] == step)
        if kept and "eval/accuracy" in row:
            evaluated.add(f"round_{row['round']:06d}.jsonl")
        return bool(kept)

    if metrics.exists():
        _filter(metrics, is_kept)
    this = f"round_{round:06d}.jsonl"
    for path in samples.glob(SAMPLES):
        if path.name == this:
            _filter(path, lambda record: bool(record["step"] <= step))
        elif path.name > this:
            path.unlink()
    for path in samples.glob(f"eval/{SAMPLES}"):
        if path.name >= this and path.name not in evaluated:
            path.unlink()


def _filter(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drop lines, and the file if none is left. A last line that a kill cut short is dropped, too."""
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            is_kept = keep(msgspec.json.decode(line))
        except (KeyError, TypeError, msgspec.DecodeError, UnicodeDecodeError) as why:
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
