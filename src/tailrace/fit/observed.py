"""What a run's own files say about its costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace.errors import ConfigError
from tailrace.record.rows import StepRow, from_json
from tailrace.record.timeline import RunTimelines, Timeline


@dataclass(frozen=True, slots=True)
class Observed:
    """A run.

    Args:
        processes: what each process of it did.
        prompt_tokens: mean length of the trained prompts.
    """

    processes: Sequence[Timeline]
    prompt_tokens: float


def observe(events: Path, metrics: Path) -> Observed:
    """Read a run.

    Args:
        events: events.jsonl.
        metrics: metrics.jsonl.

    Raises:
        ConfigError: a line of a file is damaged, unordered or of another version; or nothing was trained.
    """
    timelines = RunTimelines(events)
    timelines.update()
    if not any(each.requests for each in timelines.all):
        raise _refused(metrics.parent, f"{events.name} has no request", "name a run that has begun")
    return Observed(timelines.all, _prompt_tokens(metrics))


def _prompt_tokens(metrics: Path) -> float:
    """The mean length of the trained prompts."""
    num_tokens = num_trained = num_samples = 0
    for number, row in _step_rows(metrics):
        if not row.trained_samples:
            problem = f"line {number} of {metrics.name} is of another version: it has no samples/trained"
            raise _refused(metrics.parent, problem, "name a run of this version")
        num_tokens = row.num_tokens
        num_trained += row.trained_tokens
        num_samples += row.trained_samples
    if not num_samples:
        problem = f"{metrics.name} has no optimizer step"
        raise _refused(metrics.parent, problem, "name a run that has trained")
    return max(1.0, (num_tokens - num_trained) / num_samples)


def _step_rows(metrics: Path) -> Iterator[tuple[int, StepRow]]:
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError as why:
        problem = f"{metrics.name} cannot be read ({why.strerror})"
        raise _refused(metrics.parent, problem, "name the output directory of a run") from None
    last_step = 0
    for number, line in enumerate(lines, 1):
        try:
            rows = from_json(msgspec.json.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as why:
            problem = f"line {number} of {metrics.name} is torn or of another version ({why})"
            raise _refused(metrics.parent, problem, "remove that line, or name another run") from None
        for row in rows:
            if isinstance(row, StepRow):
                if row.step < last_step:
                    problem = f"line {number} of {metrics.name} is out of order: "
                    problem += f"step {row.step} is after {last_step}"
                    raise _refused(metrics.parent, problem, "remove that line, or name another run")
                last_step = row.step
                yield number, row


def _refused(path: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError("RUN", str(path), problem, remedy)
