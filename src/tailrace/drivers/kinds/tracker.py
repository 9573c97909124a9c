"""Experiment trackers: what each kind does, and the sink that feeds it.

A tracker gets the objects of metrics.jsonl under the same names, without figures that are not finite; figures
that were renamed in this release under both. One
that raises is disabled, and the run goes on without it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, cast

from typing_extensions import override

from tailrace.errors import ConfigError
from tailrace.importing import install
from tailrace.kinds import kind_of
from tailrace.record.events import Event, Row, Sink, Stepped
from tailrace.record.figures import RENAMED
from tailrace.record.metrics import JoinedRows
from tailrace.record.sinks import GuardedSink

TRACKERS = "record.trackers"
SAMPLE_COLUMNS = ("step", "prompt", "response", "reward")
TrackedSample = tuple[int, str, str, float | None]
"""A trained sample, by these columns."""


@dataclass(frozen=True)
class TrackedRun:
    """Names of one process of a run in a tracker."""

    project: str
    folder: Path
    """The output directory; its name is the name of the run."""
    config: Mapping[str, Any]
    life: int = 1
    step: int = 0
    """Optimizer steps made before this life."""

    @property
    def group(self) -> str:
        """The name of the run, in all its lives."""
        return self.folder.resolve().name

    @property
    def name(self) -> str:
        """The name of this life."""
        return self.group if self.life == 1 else f"{self.group}-life{self.life}"


class Tracker(Protocol):
    """A run in a tracker."""

    def log(self, figures: Mapping[str, float], step: int, wall_time: float) -> None:
        """Store the figures of an optimizer step. `wall_time`: seconds since the epoch."""

    def finish(self) -> None:
        """End the run. Nothing is logged after it."""


class SampleTracker(Tracker, Protocol):
    """A run in a tracker that takes samples."""

    def log_samples(self, rows: Sequence[TrackedSample], step: int) -> None:
        """Store samples of the step whose figures come next."""


class TrackerKind:
    """A kind of tracker."""

    package = ""
    """The Python package that it needs, and the extra of the installation that brings it; "": none."""
    takes_samples = False
    """Whether its runs are `SampleTracker`s."""

    def check(self) -> None:
        """Check that the package is installed, without loading it. Raises a ConfigError."""
        if self.package and find_spec(self.package) is None:
            remedy = f"{install(self.package)}, or remove it from the list"
            problem = f"the package {self.package} is not installed"
            raise ConfigError(TRACKERS, self.package, problem, remedy)

    def begin(self, run: TrackedRun) -> Tracker:
        """Begin a run in the tracker. May raise anything, for example without a login."""
        raise NotImplementedError


def tracker_kind(name: str) -> TrackerKind:
    """Return a kind of tracker. Raises as `kind_of`."""
    kind: TrackerKind = kind_of("tracker", name, TRACKERS)
    return kind


def check_trackers(names: Sequence[str], num_samples: int = 0) -> None:
    """Raises a ConfigError if a tracker does not exist, its package is not installed, or none takes samples
    where some are to be logged."""
    for name in names:
        tracker_kind(name).check()
    if num_samples and not any(tracker_kind(name).takes_samples for name in names):
        problem = f"no tracker of record.trackers takes samples ({', '.join(names) or 'there is none'})"
        raise ConfigError("record.tracker_samples", num_samples, problem, "add wandb, trackio or mlflow")


def open_trackers(
    names: Sequence[str], run: TrackedRun, say: Callable[[str], None], num_samples: int = 0
) -> list[Sink]:
    """Begin a run in each tracker. Raises a ConfigError if a tracker cannot begin, for example without a
    login, and as `check_trackers`.

    Args:
        say: shows the line that tells of a tracker's failure.
        num_samples: of each optimizer step, for those that take samples.
    """
    check_trackers(names, num_samples)
    sinks: list[Sink] = []
    for name in names:
        try:
            kind = tracker_kind(name)
            tracker = kind.begin(run)
        except Exception as why:
            problem = f"it cannot begin a run ({type(why).__name__}: {why})"
            remedy = f"see the documentation of {name}, or remove it"
            raise ConfigError(TRACKERS, name, problem, remedy) from why
        sinks.append(GuardedSink(TrackerSink(tracker, num_samples if kind.takes_samples else 0), name, say))
    return sinks


class TrackerSink(JoinedRows):
    """Sink: passes the objects of metrics.jsonl, and so many samples of each step, to a tracker."""

    def __init__(self, tracker: Tracker, num_samples: int = 0) -> None:
        super().__init__(self._log)
        self._tracker, self._step, self._num_samples = tracker, 0, num_samples
        self._samples: dict[int, list[TrackedSample]] = {}
        """Samples of steps whose rows are not complete."""

    @override
    def on(self, event: Event) -> None:
        if isinstance(event, Stepped) and self._num_samples:
            step, some = event.stats.num_steps, event.samples[: self._num_samples]
            self._samples[step] = [(step, each.prompt.text, each.text, each.reward) for each in some]
        super().on(event)

    def close(self) -> None:
        super().close()
        self._tracker.finish()

    def _log(self, row: Row) -> None:
        row = row | {old: row[new] for old, new in RENAMED.items() if new in row}
        # A tracker may list figures in the order in which it met them.
        first = [key for key in ("reward", "eval/reward", "loss") if key in row]
        figures = {key: row[key] for key in dict.fromkeys([*first, *row]) if isfinite(row[key])}
        step, wall_time = int(figures.pop("step")), figures.pop("wall_time")
        self._step = max(self._step, step)  # they take no step that is earlier than one they have
        if samples := self._samples.pop(step, None):
            cast(SampleTracker, self._tracker).log_samples(samples, self._step)
        self._tracker.log(figures, self._step, wall_time)
