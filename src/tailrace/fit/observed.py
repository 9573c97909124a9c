"""What a run's own files say about its costs.

Each life of a run has a trace with a time axis of its own. Seconds count from the trace's first event.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from tailrace.errors import ConfigError
from tailrace.record.figures import Row
from tailrace.record.metrics import read_row
from tailrace.record.trace import RUN_PID, SCORING_PID, TRAINER, WEIGHTS
from tailrace.record.trace_reader import Record, TraceReader

_MICRO = 1e-6
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Interval:
    """Work that took time."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Request(Interval):
    """What one engine did for a sample without a pause.

    Args:
        engine: its process in the trace.
        prompt: index of the prompt; negative for an evaluation.
        had: completion tokens before the request.
        tokens: completion tokens after it.
    """

    engine: int
    prompt: int
    had: int
    tokens: int
    outcome: str

    @property
    def gained(self) -> int:
        return self.tokens - self.had


@dataclass(frozen=True, slots=True)
class Pass(Interval):
    """One accumulation of the trainer."""

    samples: int
    tokens: int


@dataclass(slots=True)
class Life:
    """The work of one process of the run."""

    requests: list[Request] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    steps: list[Interval] = field(default_factory=list)
    publications: list[Interval] = field(default_factory=list)
    scorings: list[Interval] = field(default_factory=list)
    """From the end of a generation to its reward. Samples without a reward are left out."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A run.

    Args:
        prompt_tokens: mean length of the trained prompts.
        notes: what could not be read, in words.
    """

    lives: Sequence[Life]
    prompt_tokens: float
    notes: Sequence[str] = ()


class _RequestArgs(msgspec.Struct):
    sample: str
    tokens: int
    had: int
    outcome: str


class _PassArgs(msgspec.Struct):
    samples: int
    tokens: int


def observe(traces: Sequence[Path], metrics: Path) -> Observed:
    """Read a run.

    Args:
        traces: the first trace file of each life.
        metrics: metrics.jsonl.

    Raises:
        ConfigError: there is no trace; a line of a file is torn, unordered or of another version; or nothing
            was trained.
    """
    if not traces:
        raise _refused(metrics.parent, "it has no trace.json", "name a run that has begun")
    lives, notes = [], []
    for path in traces:
        reader = TraceReader(path)
        records = reader.read()
        for defect in reader.defects:
            problem = f"line {defect.line} of {defect.file}: {defect.problem}"
            raise _refused(path.parent, problem, "remove that trace, or name another run")
        if reader.gaps:
            end = reader.gaps[0][0]
            records = [record for record in records if record.end <= end]
            notes.append(
                f"{path.name} goes on in files that were removed: only its first {end * _MICRO:,.1f} s count "
                "(record.trace_max_bytes)"
            )
        lives.append(_life(path, records))
    if not any(life.requests for life in lives):
        raise _refused(metrics.parent, "its trace has no request", "name a run that has begun")
    return Observed(lives, _prompt_tokens(metrics), notes)


def _life(path: Path, records: Sequence[Record]) -> Life:
    life = Life()
    for record in records:
        if record.ph != "X":
            continue
        start_s, end_s = record.ts * _MICRO, record.end * _MICRO
        if record.pid == SCORING_PID:
            if _is_reward(_args(path, record, _RequestArgs).outcome):
                life.scorings.append(Interval(start_s, end_s))
        elif record.pid != RUN_PID:
            args = _args(path, record, _RequestArgs)
            prompt = int(args.sample.partition(".")[0])
            life.requests.append(
                Request(start_s, end_s, record.pid, prompt, args.had, args.tokens, args.outcome)
            )
        elif record.tid == WEIGHTS.tid:
            life.publications.append(Interval(start_s, end_s))
        elif record.tid == TRAINER.tid and record.name == "accumulate":
            passed = _args(path, record, _PassArgs)
            life.passes.append(Pass(start_s, end_s, passed.samples, passed.tokens))
        elif record.tid == TRAINER.tid:
            life.steps.append(Interval(start_s, end_s))
    return life


def _is_reward(outcome: str) -> bool:
    """Whether a sample got a reward. Else the word after "reward" says why it failed."""
    try:
        return math.isfinite(float(outcome.removeprefix("reward ")))
    except ValueError:
        return False


def _args(path: Path, record: Record, kind: type[S]) -> S:
    try:
        return msgspec.convert(record.args, kind)
    except msgspec.ValidationError as why:
        problem = f"{path.name} is of another version: {record.name!r} at {record.ts} us has {why}"
        raise _refused(path.parent, problem, "name a run of this version") from None


def _prompt_tokens(metrics: Path) -> float:
    """The mean length of the trained prompts."""
    num_tokens = num_trained = num_samples = 0.0
    for number, row in _step_rows(metrics):
        if not row.get("samples/trained"):
            problem = f"line {number} of {metrics.name} is of another version: it has no samples/trained"
            raise _refused(metrics.parent, problem, "name a run of this version")
        num_tokens = row["num_tokens"]
        num_trained += row["tokens/trained"]
        num_samples += row["samples/trained"]
    if not num_samples:
        problem = f"{metrics.name} has no optimizer step"
        raise _refused(metrics.parent, problem, "name a run that has trained")
    return max(1.0, (num_tokens - num_trained) / num_samples)


def _step_rows(metrics: Path) -> Iterator[tuple[int, Row]]:
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError as why:
        problem = f"{metrics.name} cannot be read ({why.strerror})"
        raise _refused(metrics.parent, problem, "name the output directory of a run") from None
    last_step = 0.0
    for number, line in enumerate(lines, 1):
        try:
            row = read_row(line)
        except (ValueError, LookupError) as why:
            problem = f"line {number} of {metrics.name} is torn or of another version ({why})"
            raise _refused(metrics.parent, problem, "remove that line, or name another run") from None
        if "loss" not in row:
            continue
        if row["step"] < last_step:
            problem = f"line {number} of {metrics.name} is out of order: "
            problem += f"step {row['step']} is after {last_step}"
            raise _refused(metrics.parent, problem, "remove that line, or name another run")
        last_step = row["step"]
        yield number, row


def _refused(path: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError("RUN", str(path), problem, remedy)
