"""trace.json: the run as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

One process is the run, with lanes for rounds, trainer, weights, the controller's lag and what a live run
waits for now. One is the scoring stage: a sample has a lane there from the end of its generation to its
reward. Each engine is a process with a lane for each request that it has at the same time; a mark across it
tells that it died, fell asleep or opened. An arrow goes from the last request of a group to each
step that trains it. What has begun and not ended stands at the end of the array, as records of phase "B",
until the next flush. Times are microseconds since the first event. Equal events make equal bytes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tailrace.record.events import (
    Accumulated,
    ControllerLag,
    EngineStateChanged,
    Evaluated,
    Event,
    GroupEnded,
    Published,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    SampleScored,
    Stepped,
    TokensWasted,
    Waiting,
    time_of,
)
from tailrace.record.timeline import Lanes
from tailrace.record.trace_file import TraceFile
from tailrace.types import SampleId


class _Lane(NamedTuple):
    pid: int
    tid: int


RUN_PID = 1
ROUNDS, TRAINER, WEIGHTS, CONTROLLER, WAITS = (_Lane(RUN_PID, tid) for tid in range(1, 6))
SCORING, SCORING_PID = "scoring", 10_000
FORMAT, FORMAT_RECORD = 1, "tailrace_trace"
"""The version of what the records mean, and the name of the record that has it."""
FLUSH_S = 2.0
"""Seconds after which a live run's trace is written, whether a step has come or not."""


@dataclass(frozen=True, slots=True)
class _Open:
    """Something that has begun and not ended."""

    lane: _Lane
    lanes: Lanes
    start_s: float
    num_tokens: int


class TraceWriter:
    """Sink: writes the trace, which is complete after every optimizer step, round and evaluation."""

    def __init__(
        self, path: Path, *, max_bytes: int = 64 * 2**20, waits: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        """
        Args:
            path: the first file; a longer trace goes on in files beside it (`trace_file.TraceFile`).
            max_bytes: the largest size of one file.
            waits: says what tasks wait for now, and since when. They stand at the end of the array.
        """
        self._file, self._waits = TraceFile(path, max_bytes), waits
        self._origin_s: float | None = None
        self._now_s = 0.0
        self._round: RoundStarted | None = None
        self._pids = {SCORING: SCORING_PID}
        self._lanes: dict[str, Lanes] = {}
        self._requests: dict[SampleId, _Open] = {}
        self._unscored: dict[SampleId, _Open] = {}
        """Samples that are generated and wait for their reward."""
        self._finished: dict[int, tuple[_Lane, float]] = {}
        """Lane and end of the last request of each group, by prompt."""
        self._ended: list[int] = []
        """Prompts whose groups ended in this round."""
        self._num_flows = 0
        self._flushed_s = 0.0
        self._label(FORMAT_RECORD, _Lane(RUN_PID, 0), format=FORMAT)
        self._name_process(RUN_PID, "run")
        names = ("rounds", "trainer", "weights", "controller", "waits")
        for lane, name in zip((ROUNDS, TRAINER, WEIGHTS, CONTROLLER, WAITS), names, strict=True):
            self._label("thread_name", lane, name=name)
        self._file.flush()

    def on(self, event: Event) -> None:
        self._now_s = time_of(event)
        if self._origin_s is None:
            self._origin_s = self._now_s
        match event:
            case RequestStarted():
                self._end_scoring(event.sample, "next turn")
                self._requests[event.sample] = self._open(event.engine, event.num_tokens)
            case RequestEnded():
                self._end_request(event)
            case SampleScored():
                self._end_scoring(event.sample, event.failure or f"reward {event.reward}")
            case TokensWasted():
                self._end_scoring(event.sample, event.reason)
            case GroupEnded():
                self._ended.append(event.prompt)
            case Accumulated():
                args = {"samples": len(event.samples), "tokens": event.num_tokens}
                self._slice(TRAINER, "accumulate", event.start_s, event.end_s, args)
            case Stepped():
                self._step(event)
                self._flush()
            case Published():
                self._slice(WEIGHTS, f"publish {event.version}", event.start_s, event.end_s, {})
            case ControllerLag():
                self._slice(CONTROLLER, "late", event.time_s - event.lag_s, event.time_s, {})
                if self._now_s - self._flushed_s >= FLUSH_S:
                    self._flush()
            case Waiting():
                name = f"no optimizer step for {event.quiet_s:.0f} s"
                instant = {"name": name, "ph": "i", "s": "t", "args": {"waiting": event.what}}
                self._file.put({**instant, **self._at(ROUNDS, event.time_s)})
                self._flush()
            case EngineStateChanged():
                name, lane = f"{event.engine} is {event.state}", _Lane(self._process(event.engine), 0)
                instant = {"name": name, "ph": "i", "s": "p", "args": {"why": event.why}}
                self._file.put({**instant, **self._at(lane, event.time_s)})
            case RoundStarted():
                self._round = event
            case RoundEnded():
                self._end_round()
                self._flush()
            case Evaluated():
                name = f"accuracy {event.accuracy:.3f}"
                self._file.put({"name": name, "ph": "i", "s": "t", **self._at(ROUNDS, event.time_s)})
                self._flush()

    def close(self) -> None:
        """What has not ended is given the time of the last event as its end."""
        for sample in list(self._requests):
            self._end_slice(self._requests, sample, "unfinished")
        for sample in list(self._unscored):
            self._end_scoring(sample, "unfinished")
        self._end_round()
        self._file.close()

    def _flush(self) -> None:
        self._flushed_s = self._now_s
        self._file.flush(self._unfinished())

    def _unfinished(self) -> Iterator[dict[str, object]]:
        """Yield a record for what has begun and not ended, the oldest requests first."""
        if self._round:
            args: dict[str, object] = {"version": self._round.version}
            start = self._at(ROUNDS, self._round.time_s)
            yield {"name": f"round {self._round.round}", "ph": "B", **start, "args": args}
        for what, since_s in self._waits().items():
            yield {"name": what, "ph": "B", **self._at(WAITS, since_s)}
        for sample, opened in [*self._requests.items(), *self._unscored.items()]:
            args = {"sample": str(sample), "had": opened.num_tokens}
            yield {"name": _name_of(sample), "ph": "B", **self._at(opened.lane, opened.start_s), "args": args}

    def _open(self, process: str, num_tokens: int) -> _Open:
        """Take the lowest free lane of an engine or of the scoring stage."""
        pid = self._process(process)
        lanes, known = self._lanes[process], self._lanes[process].num_lanes
        lane = _Lane(pid, lanes.take() + 1)
        if lanes.num_lanes > known:
            name = f"{'sample' if process == SCORING else 'slot'} {lane.tid}"
            self._label("thread_name", lane, name=name)
        return _Open(lane, lanes, self._now_s, num_tokens)

    def _process(self, name: str) -> int:
        """The number of an engine's process, or of the scoring stage's."""
        pid = self._pids.setdefault(name, RUN_PID + len(self._pids))
        if name not in self._lanes:
            self._lanes[name] = Lanes()
            self._name_process(pid, name)
        return pid

    def _end_request(self, event: RequestEnded) -> None:
        lane = self._end_slice(self._requests, event.sample, event.outcome, event.num_tokens)
        if event.sample.prompt >= 0 and event.outcome in ("stop", "length"):
            self._finished[event.sample.prompt] = (lane, self._now_s)
            self._unscored[event.sample] = self._open(SCORING, event.num_tokens)

    def _end_scoring(self, sample: SampleId, outcome: str) -> None:
        """End the slice after a sample's last request. A sample that finished in an earlier life of the run
        has no lane."""
        if sample in self._unscored:
            self._end_slice(self._unscored, sample, outcome)

    def _end_slice(
        self, of: dict[SampleId, _Open], sample: SampleId, outcome: str, num_tokens: int | None = None
    ) -> _Lane:
        opened = of.pop(sample)
        opened.lanes.give_back(opened.lane.tid - 1)
        args = {
            "sample": str(sample),
            "tokens": opened.num_tokens if num_tokens is None else num_tokens,
            "had": opened.num_tokens,
            "outcome": outcome,
        }
        self._slice(opened.lane, _name_of(sample), opened.start_s, self._now_s, args)
        return opened.lane

    def _step(self, event: Stepped) -> None:
        stats = event.stats
        args = {"samples": len(stats.samples), "tokens": stats.num_tokens, "loss": stats.loss}
        self._slice(TRAINER, f"step {stats.num_steps}", event.start_s, event.end_s, args)
        for prompt in dict.fromkeys(sample.prompt for sample in stats.samples):
            if prompt in self._finished:
                self._flow(*self._finished[prompt], event.start_s)

    def _flow(self, lane: _Lane, end_s: float, step_s: float) -> None:
        """Draw an arrow. It binds to the slice around its time; the end of a slice is already outside of
        it."""
        self._num_flows += 1
        common: dict[str, object] = {"name": "trained", "cat": "group", "id": self._num_flows}
        start = self._at(lane, end_s)
        start["ts"] -= 1
        self._file.put({**common, "ph": "s", **start})
        self._file.put({**common, "ph": "f", "bp": "e", **self._at(TRAINER, step_s)})

    def _end_round(self) -> None:
        if self._round:
            args = {"version": self._round.version}
            self._slice(ROUNDS, f"round {self._round.round}", self._round.time_s, self._now_s, args)
            self._round = None
        for prompt in self._ended:
            self._finished.pop(prompt, None)
        self._ended.clear()

    def _slice(
        self, lane: _Lane, name: str, start_s: float, end_s: float, args: Mapping[str, object]
    ) -> None:
        start, end = self._at(lane, start_s), self._at(lane, end_s)
        self._file.put({"name": name, "ph": "X", **start, "dur": end["ts"] - start["ts"], "args": args})

    def _at(self, lane: _Lane, time_s: float) -> dict[str, int]:
        assert self._origin_s is not None
        return {"pid": lane.pid, "tid": lane.tid, "ts": max(0, round((time_s - self._origin_s) * 1e6))}

    def _name_process(self, pid: int, name: str) -> None:
        self._label("process_name", _Lane(pid, 0), name=name)
        self._label("process_sort_index", _Lane(pid, 0), sort_index=pid)

    def _label(self, kind: str, lane: _Lane, **args: object) -> None:
        self._file.put_header({"name": kind, "ph": "M", "pid": lane.pid, "tid": lane.tid, "args": args})


def _name_of(sample: SampleId) -> str:
    return f"group {sample.prompt}" if sample.prompt >= 0 else "evaluation"
