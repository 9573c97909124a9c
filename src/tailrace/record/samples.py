"""The samples of a run: samples/round_000003.jsonl has those trained in a round, in the order of training;
samples/eval/round_000003.jsonl has those of the evaluation before that round."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tailrace.record.events import Evaluated, EvaluatedSample, Event, RoundStarted, Stepped
from tailrace.types import Sample


class SamplesWriter:
    """Sink: appends a step's samples to its round's file, and writes a file for each evaluation."""

    def __init__(self, folder: Path, *, token_samples: int = 0) -> None:
        self._token_samples = token_samples  # those of a step that are written with tokens and log-probs
        self._folder, self._path = folder, folder / _name(0)
        (folder / "eval").mkdir(parents=True, exist_ok=True)

    def on(self, event: Event) -> None:
        match event:
            case RoundStarted():
                self._path = self._folder / _name(event.round)
            case Stepped():
                with self._path.open("ab") as file:
                    file.writelines(self._lines(event))
            case Evaluated(samples=(_, *_)):
                lines = [_evaluated_line(sample) for sample in event.samples]
                (self._folder / "eval" / _name(event.round)).write_bytes(b"".join(lines))

    def _lines(self, event: Stepped) -> Iterator[bytes]:
        for number, sample in enumerate(event.samples):
            record = _trained_record(sample, event.stats.num_steps)
            if sample is sample.group.trainable[0]:
                record["columns"] = sample.prompt.shown_columns
            if number < self._token_samples and sample.completion_ids:
                record["completion_ids"] = sample.completion_ids
                record["logprobs"] = [round(logprob, 4) for logprob in sample.behavior_logprobs]
            yield msgspec.json.encode(record) + b"\n"

    def close(self) -> None:
        """Do nothing: the files are complete after each event."""


def files_by_round(folder: Path) -> dict[int, Path]:
    """Return the files of a folder that the writer makes, by round, the oldest first."""
    names = ((re.fullmatch(r"round_(\d+)\.jsonl", path.name), path) for path in folder.glob("round_*.jsonl"))
    return dict(sorted((int(found[1]), path) for found, path in names if found))


def _name(round: int) -> str:
    return f"round_{round:06d}.jsonl"


def _trained_record(sample: Sample, step: int) -> dict[str, object]:
    record: dict[str, object] = {
        "id": str(sample.id),
        "step": step,
        "prompt": sample.prompt.text,
        "asked": sample.prompt.asked,
        "text": sample.text,
        "reward": sample.reward,
        "rewards": sample.reward_metrics,
        "reward_columns": sample.reward_columns,
        "source": sample.prompt.source,
        "advantage": sample.advantage,
        "finish_reason": sample.finish_reason,
        "num_tokens": sample.num_tokens,
        "spans": sample.spans,
        "num_masked": sample.num_masked,
    }
    if sample.turns:
        record |= {"turns": sample.turns, "messages": sample.messages}
    return record


def _evaluated_line(sample: EvaluatedSample) -> bytes:
    return msgspec.json.encode(msgspec.structs.asdict(sample) | {"id": str(sample.id)}) + b"\n"
