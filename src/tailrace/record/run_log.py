"""events.jsonl: the events of a run as JSON, one a line, tagged by their names in `events.py`.

Lines are only appended. Each process of a run begins with a `RunStarted`, which says from where the run goes
on, so nothing is taken out of the file when a run is resumed. A process that is killed may leave a torn last
line: readers stop before it, and the next process of the run cuts it off. Equal events make equal bytes.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tailrace.errors import ConfigError
from tailrace.record import events
from tailrace.record.events import ControllerLag, Event, Interval, LoggedEvent, OpenWaits, RunStarted, time_of

FORMAT = 1
FLUSH_BYTES = 64 * 1024
FLUSH_S = 2.0
"""Seconds after which a live run's log is written, whether a step has come or not."""
LATE_S = 0.05
"""Smaller lags of the controller are recorded only once in `FLUSH_S`, as a sign of life."""
FLUSHED = (events.OptimizerStep, events.RoundEnded, events.Evaluated, events.Waiting, events.BooksClosed)
"""The file is written after them."""

_DECODER = msgspec.json.Decoder(LoggedEvent)
_ENCODER = msgspec.json.Encoder()


class LogWriter:
    """Sink: appends events to the log of a run. `waits` says what tasks wait for now, and since when; the
    numbers are those of `RunStarted`."""

    def __init__(
        self,
        path: Path,
        *,
        waits: Callable[[], Mapping[str, float]] = dict,
        life: int = 1,
        round: int = 0,
        version: int = 0,
        step: int = 0,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("ab")
        self._start: RunStarted | None = RunStarted(0.0, life, round, version, step, FORMAT)
        self._waits, self._known_waits = waits, dict[str, float]()
        self._buffer = bytearray()
        self._flushed_s = self._now_s = 0.0

    def on(self, event: Event) -> None:
        if (line := events.logged(event)) is None:
            return
        self._now_s = time_of(line)
        if self._start:
            self._put(replace(self._start, time_s=self._now_s))
            self._start, self._flushed_s = None, self._now_s
        if not isinstance(line, ControllerLag):
            self._put(line)
            if isinstance(line, FLUSHED):
                self._flush()
        elif self._now_s - self._flushed_s >= FLUSH_S:
            self._put(line)
            self._flush()
        elif line.lag_s >= LATE_S:
            self._put(line)

    def close(self) -> None:
        self._write()
        self._file.close()

    def _put(self, line: LoggedEvent) -> None:
        self._buffer += _ENCODER.encode(line)
        self._buffer += b"\n"
        if len(self._buffer) >= FLUSH_BYTES:
            self._write()

    def _flush(self) -> None:
        self._flushed_s = self._now_s
        if (waits := dict(self._waits())) != self._known_waits:
            self._put(OpenWaits(self._now_s, waits))
            self._known_waits = waits
        self._write()

    def _write(self) -> None:
        written, self._buffer = self._buffer, bytearray()  # a full disk raises; what was written stays
        self._file.write(written)
        self._file.flush()


def _cut_torn_line(path: Path) -> None:
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        os.truncate(path, end)


class LogReader:
    """Decodes the events of a run, also while it writes them.

    Their times are seconds since the run's first event. The time between two of its processes is not
    counted: what the second one does follows at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_torn = False
        """The file ends within a line."""
        self.num_lines = self._offset = 0
        self._last = b""
        """The last line that was read."""
        self._now_s = self._shift_s = 0.0

    def was_replaced(self) -> bool:
        """Whether another run was begun in the folder: the last line that was read is not where it was."""
        return bool(self._last) and self._content(len(self._last)) != self._last

    def read(self) -> Iterator[LoggedEvent]:
        """Yield the events that were appended since the last call. Raises a ConfigError if a line is no event
        of this version, or is out of order. A torn last line is left out."""
        data = self._content()[len(self._last) :]
        self.is_torn = not data.endswith(b"\n") and bool(data)
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            self._last, self._offset, self.num_lines = line, self._offset + len(line), self.num_lines + 1
            if line.strip():
                yield self._event(line)

    def _event(self, line: bytes) -> LoggedEvent:
        try:
            event: LoggedEvent = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as why:
            raise self._refused(f"it is no event of this version ({why})") from None
        if isinstance(event, RunStarted):
            if (found := event.format) != FORMAT:
                raise self._refused(f"the log has format {found}, and this version reads format {FORMAT}")
            self._shift_s = self._now_s - event.time_s
        elif self.num_lines == 1:
            raise self._refused("no RunStarted comes before it")
        event = _shifted(event, self._shift_s) if self._shift_s else event
        if time_of(event) < self._now_s - 1e-9:  # shifted times are rounded
            raise self._refused("its time is before that of the line above")
        self._now_s = max(self._now_s, time_of(event))
        return event

    def _content(self, size: int = -1) -> bytes:
        """The last line that was read, and what follows it."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                return file.read(size)
        except FileNotFoundError:
            return b""

    def _refused(self, problem: str) -> ConfigError:
        problem = f"line {self.num_lines} of {self.path.name}: {problem}"
        remedy = "put a copy of the file back, or name another run"
        return ConfigError("RUN", str(self.path.parent), problem, remedy)


def _shifted(event: LoggedEvent, by_s: float) -> LoggedEvent:
    if isinstance(event, Interval):
        return replace(event, start_s=event.start_s + by_s, end_s=event.end_s + by_s)
    if isinstance(event, OpenWaits):
        since_s = {what: since_s + by_s for what, since_s in event.since_s.items()}
        return replace(event, time_s=event.time_s + by_s, since_s=since_s)
    return replace(event, time_s=event.time_s + by_s)
