"""Sinks that a user asks for: own ones (`[record] sinks = ["mine.py:sink"]`), and the experiment trackers
trackio, wandb and TensorBoard.

A sink that raises is disabled, and the run goes on without it. A tracker gets the objects of metrics.jsonl
under the same names. A figure that is not finite is left out. Each life of a run is a run of its own in
trackio and wandb, in one group. TensorBoard drops the steps that a resumed run makes again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from tailrace.errors import ConfigError
from tailrace.importing import import_function, install
from tailrace.record.base import TrackerName
from tailrace.record.events import Event, Sink
from tailrace.record.figures import Row
from tailrace.record.metrics import JoinedRows

SINKS, TRACKERS = "record.sinks", "record.trackers"


def import_sinks(specs: Sequence[str]) -> list[Callable[[Path], Sink]]:
    """The functions that the config names. Raises a ConfigError for one that cannot be imported."""
    return [import_function(spec, SINKS) for spec in specs]


def open_sinks(specs: Sequence[str], folder: Path, say: Callable[[str], None]) -> list[Sink]:
    """Make the sinks that the config names, for the run in an output directory; `say` shows the line that
    tells of a sink's failure. Raises a ConfigError if a function cannot be imported, raises, or returns
    something that is no sink."""
    sinks: list[Sink] = []
    for spec, function in zip(specs, import_sinks(specs), strict=True):
        try:
            sink = function(folder)
        except Exception as why:
            problem = f"it raised {type(why).__name__}: {why}"
            raise ConfigError(SINKS, spec, problem, "mend it, or remove it from the list") from why
        if not callable(getattr(sink, "on", None)) or not callable(getattr(sink, "close", None)):
            problem = f"it returned a {type(sink).__name__}, which is no sink"
            raise ConfigError(SINKS, spec, problem, "return an object with on(event) and close()")
        sinks.append(GuardedSink(sink, spec, say))
    return sinks


class GuardedSink:
    """Sink: passes events to a user's sink until that raises. The run goes on without it."""

    def __init__(self, sink: Sink, name: str, say: Callable[[str], None]) -> None:
        self._sink: Sink | None = sink
        self._name, self._say = name, say

    def on(self, event: Event) -> None:
        if self._sink:
            try:
                self._sink.on(event)
            except Exception as why:
                self._disable(f"on({type(event).__name__})", why)

    def close(self) -> None:
        if self._sink:
            try:
                self._sink.close()
            except Exception as why:
                self._disable("close()", why)

    def _disable(self, call: str, why: Exception) -> None:
        """The sink is not closed: it is in an unknown state."""
        self._sink = None
        self._say(f"Sink {self._name} is disabled | {call} raised {type(why).__name__}: {why}")


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
        return self.folder.resolve().name

    @property
    def name(self) -> str:
        return self.group if self.life == 1 else f"{self.group}-life{self.life}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that trackio.init and wandb.init have in common."""
        return {"project": self.project, "name": self.name, "group": self.group, "config": dict(self.config)}


class Tracker(Protocol):
    def log(self, figures: Mapping[str, float], step: int, wall_time: float) -> None: ...

    def finish(self) -> None: ...


class ServiceTracker:
    """A run in trackio or wandb, whose interfaces are alike."""

    def __init__(self, run: Any, *left_out: str) -> None:
        self._run, self._left_out = run, left_out

    def log(self, figures: Mapping[str, float], step: int, wall_time: float) -> None:
        self._run.log({key: figures[key] for key in figures if key not in self._left_out}, step=step)

    def finish(self) -> None:
        self._run.finish()


def _begin_trackio(run: TrackedRun) -> Tracker:
    import trackio

    return ServiceTracker(trackio.init(**run.arguments, embed=False), "time")  # it has a `time` of its own


def _begin_wandb(run: TrackedRun) -> Tracker:
    import wandb

    settings = wandb.Settings(console="off")  # the terminal belongs to the display
    return ServiceTracker(wandb.init(**run.arguments, dir=run.folder, settings=settings))


class TensorBoard:
    """Writes event files below `tensorboard/` in the output directory."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        if run.life > 1:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=run.step + 1, session_log=start))

    def log(self, figures: Mapping[str, float], step: int, wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def finish(self) -> None:
        self._writer.close()


_TRACKERS: Mapping[TrackerName, Callable[[TrackedRun], Tracker]] = {
    "trackio": _begin_trackio,
    "wandb": _begin_wandb,
    "tensorboard": TensorBoard,
}
"""A name is also that of the Python package and of tailrace's extra."""


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raises a ConfigError if a package is not installed. Loads none."""
    for name in names:
        if find_spec(name) is None:
            remedy = f"{install(name)}, or remove it from the list"
            raise ConfigError(TRACKERS, name, f"the package {name} is not installed", remedy)


def open_trackers(names: Sequence[TrackerName], run: TrackedRun, say: Callable[[str], None]) -> list[Sink]:
    """Begin a run in each tracker. `say` shows the line that tells of a tracker's failure. Raises a
    ConfigError if a tracker cannot begin, for example without a login."""
    check_trackers(names)
    sinks: list[Sink] = []
    for name in names:
        try:
            tracker = _TRACKERS[name](run)
        except Exception as why:
            problem = f"it cannot begin a run ({type(why).__name__}: {why})"
            raise ConfigError(
                TRACKERS, name, problem, f"see the documentation of {name}, or remove it"
            ) from why
        sinks.append(GuardedSink(TrackerSink(tracker), name, say))
    return sinks


class TrackerSink(JoinedRows):
    """Sink: passes the objects of metrics.jsonl to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(self._log)
        self._tracker = tracker

    def close(self) -> None:
        super().close()
        self._tracker.finish()

    def _log(self, row: Row) -> None:
        figures = {key: value for key, value in row.items() if isfinite(value)}
        step, wall_time = int(figures.pop("step")), figures.pop("wall_time")
        self._tracker.log(figures, step, wall_time)
