"""What a run's own files say about its costs, and the form of what is fitted to it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import ConfigError
from tailrace.record.events import Interval
from tailrace.record.intervals import union
from tailrace.record.timeline import RunTimelines, Timeline

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitPart:
    """Fitted parameters of one kind of work.

    Args:
        values: by the key of the config, such as "sim.engines.base_s".
        observations: how many the fit rests on.
        explained: share of the variance that it explains; None where there is no such share.
        notes: what could not be identified, in words.
    """

    name: str
    values: Mapping[str, object]
    observations: int
    explained: float | None
    notes: Sequence[str]


class Busy:
    """The times at which at least one of some intervals lasts."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._starts, self._ends = union([(each.start_s, each.end_s) for each in intervals]).T
        self._before = np.concatenate([[0.0], np.cumsum(self._ends - self._starts)])

    def seconds(self, starts: Array, ends: Array) -> Array:
        """Return the busy seconds between each start and end."""
        return self._until(ends) - self._until(starts)

    def _until(self, times: Array) -> Array:
        if not len(self._starts):
            return np.zeros(len(times))
        number = np.searchsorted(self._starts, times, side="right")
        inside = np.minimum(times, self._ends[number - 1]) - self._starts[number - 1]
        before = self._before[np.maximum(number - 1, 0)]
        return np.where(number > 0, before + inside, 0.0)


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
    num_tokens = num_trained = num_samples = 0.0
    for number, row in _steps(metrics):
        if not row.get("samples/trained"):
            problem = f"line {number} of {metrics.name} is of another version: it has no samples/trained"
            raise _refused(metrics.parent, problem, "name a run of this version")
        num_tokens = row["num_tokens"] or 0.0
        num_trained += row["tokens/trained"] or 0.0
        num_samples += row["samples/trained"] or 0.0
    if not num_samples:
        problem = f"{metrics.name} has no optimizer step"
        raise _refused(metrics.parent, problem, "name a run that has trained")
    return max(1.0, (num_tokens - num_trained) / num_samples)


def _steps(metrics: Path) -> Iterator[tuple[int, dict[str, float | None]]]:
    """The number of the line and the figures of each optimizer step."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError as why:
        problem = f"{metrics.name} cannot be read ({why.strerror})"
        raise _refused(metrics.parent, problem, "name the output directory of a run") from None
    last_step = 0.0
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line, type=dict[str, float | None])
            step = row["step"] or 0.0
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError) as why:
            problem = f"line {number} of {metrics.name} is torn or of another version ({why})"
            raise _refused(metrics.parent, problem, "remove that line, or name another run") from None
        if step < last_step:
            problem = f"line {number} of {metrics.name} is out of order: step {step} is after {last_step}"
            raise _refused(metrics.parent, problem, "remove that line, or name another run")
        last_step = step
        if "loss" in row:
            yield number, row


def _refused(path: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError("RUN", str(path), problem, remedy)
