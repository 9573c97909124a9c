"""samples/round_000003.jsonl: every sample that was trained in the round, in the order it was."""

from pathlib import Path

import msgspec

from tailrace.record.events import Event, RoundStarted, Stepped
from tailrace.types import Sample


class SamplesWriter:
    """Sink: appends a step's samples to its round's file."""

    def __init__(self, folder: Path, *, first_round: int = 0) -> None:
        """first_round: the round that comes first; files of it and of later ones are removed."""
        self._folder = folder
        self._path = _path(folder, first_round)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("round_*.jsonl"):
            if path.name >= self._path.name:
                path.unlink()

    def on(self, event: Event) -> None:
        match event:
            case RoundStarted():
                self._path = _path(self._folder, event.round)
            case Stepped():
                lines = [_line(sample, event.stats.num_steps) for sample in event.samples]
                with self._path.open("ab") as file:
                    file.writelines(lines)

    def close(self) -> None:
        """Nothing is held back."""


def _path(folder: Path, round: int) -> Path:
    return folder / f"round_{round:06d}.jsonl"


def _line(sample: Sample, step: int) -> bytes:
    record = {
        "id": str(sample.id),
        "step": step,
        "prompt": sample.prompt.text,
        "text": sample.text,
        "reward": sample.reward,
        "advantage": sample.advantage,
        "finish_reason": sample.finish_reason,
        "num_tokens": sample.num_tokens,
        "spans": sample.spans,
    }
    return msgspec.json.encode(record) + b"\n"
