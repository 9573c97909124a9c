"""Sinks of a user's own: `[record] sinks = ["mine.py:sink"]`.

One that raises is disabled, and the run goes on without it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from tailrace.errors import ConfigError
from tailrace.importing import import_function
from tailrace.record.events import Event, Sink

SINKS = "record.sinks"


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


class FunctionSink:
    """Sink: calls a function with each event."""

    def __init__(self, function: Callable[[Event], None]) -> None:
        self.on = function

    def close(self) -> None: ...


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
