"""A run log as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

One process is the run, with lanes for rounds, trainer, weights, the controller's lag and what it waited for
at the end. One is the scoring stage: a sample has a lane there from the end of its generation to its reward.
Each engine is a process with a lane for each of its slots; a mark across it tells that it died, fell asleep
or opened. An arrow goes from the last request of a group to each step that trains it. Times are microseconds
since the run's first event; the time between two processes of a run is left out.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tailrace.record.events import (
    Accumulated,
    ControllerLag,
    EngineStateChanged,
    Evaluated,
    GroupEnded,
    Interval,
    LoggedEvent,
    OptimizerStep,
    Published,
    RunStarted,
    Waiting,
)
from tailrace.record.run_log import LogReader
from tailrace.record.timeline import Paired, RoundSpan, Scoring, ServedRequest, Timeline

TraceEvent: TypeAlias = dict[str, Any]
"""A record of the trace-event format."""


class _Lane(NamedTuple):
    pid: int
    tid: int


RUN_PID = 1
ROUNDS, TRAINER, WEIGHTS, CONTROLLER, WAITS = (_Lane(RUN_PID, tid) for tid in range(1, 6))
LANES = ("rounds", "trainer", "weights", "controller", "waits")
SCORING, SCORING_PID = "scoring", 10_000


def write_perfetto(log: Path, path: Path) -> None:
    """Write the trace of a run.

    Args:
        log: events.jsonl.
        path: the trace, a JSON array.

    Raises:
        ConfigError: the log has a bad line.
    """
    with path.open("wb") as file:
        separator = b"[\n"
        for record in trace_events(LogReader(log).read()):
            file.write(separator + msgspec.json.encode(record))
            separator = b",\n"
        file.write(b"\n]\n")


def trace_events(events: Iterable[LoggedEvent]) -> Iterator[TraceEvent]:
    """The trace of a run's events."""
    trace = _Trace()
    yield from trace.names_of_the_run()
    for event in events:
        yield from trace.of(event)
    yield from trace.unfinished()


class _Trace:
    def __init__(self) -> None:
        self._process = Timeline()
        self._pids = {SCORING: SCORING_PID}
        self._named: set[_Lane] = set()
        self._finished: dict[int, tuple[_Lane, float]] = {}
        """Lane and end of the last request of each group, by prompt."""
        self._ended: list[int] = []
        """Prompts whose groups ended in this round."""
        self._num_arrows = 0

    def names_of_the_run(self) -> Iterator[TraceEvent]:
        yield from self._process_name(RUN_PID, "run")
        for tid, name in enumerate(LANES, 1):
            yield _label("thread_name", _Lane(RUN_PID, tid), name=name)

    def of(self, event: LoggedEvent) -> Iterator[TraceEvent]:
        if isinstance(event, RunStarted):
            yield from self.unfinished()
            self._process = Timeline()
        if paired := self._process.on(event):
            yield from self._paired(paired)
        match event:
            case Accumulated():
                args = {"samples": len(event.samples), "tokens": event.num_tokens}
                yield _slice(TRAINER, "accumulate", event, args)
            case OptimizerStep():
                args = {"samples": len(event.samples), "tokens": event.num_tokens}
                yield _slice(TRAINER, f"step {event.number}", event, {**args, "loss": event.loss})
                yield from self._arrows(event)
            case Published():
                yield _slice(WEIGHTS, f"publish {event.version}", event, {})
            case ControllerLag():
                yield _slice(CONTROLLER, "late", Interval(event.time_s - event.lag_s, event.time_s), {})
            case Waiting():
                name = f"no optimizer step for {event.quiet_s:.0f} s"
                yield _mark(ROUNDS, name, "t", event.time_s, {"waiting": event.what})
            case Evaluated():
                yield _mark(ROUNDS, f"accuracy {event.accuracy:.3f}", "t", event.time_s, {})
            case EngineStateChanged():
                lane = _Lane(self._pid(event.engine), 0)
                yield from self._name(lane, event.engine)
                name = f"{event.engine} is {event.state}"
                yield _mark(lane, name, "p", event.time_s, {"why": event.why})
            case GroupEnded():
                self._ended.append(event.prompt)

    def unfinished(self) -> Iterator[TraceEvent]:
        """What a process had begun and not ended at its last event."""
        last = self._process
        opened: list[Paired] = [*last.open_rounds, *last.open_requests, *last.open_scorings]
        for paired in opened:
            yield from self._paired(paired)
        for what, since_s in sorted(last.waits.items(), key=lambda wait: wait[1]):
            yield _slice(WAITS, what, Interval(since_s, last.end_s), {})

    def _paired(self, work: Paired) -> Iterator[TraceEvent]:
        match work:
            case RoundSpan():
                yield _slice(ROUNDS, work.name, work, {"version": work.version})
                for prompt in self._ended:
                    self._finished.pop(prompt, None)
                self._ended.clear()
            case ServedRequest():
                lane = _Lane(self._pid(work.engine), work.slot)
                yield from self._name(lane, work.engine)
                args = {"sample": str(work.sample), "tokens": work.num_tokens, "had": work.had}
                name = "evaluation" if work.is_evaluation else f"group {work.sample.prompt}"
                yield _slice(lane, name, work, args | {"outcome": work.outcome})
                if work.is_response:
                    self._finished[work.sample.prompt] = lane, work.end_s
            case Scoring():
                lane = _Lane(SCORING_PID, work.slot)
                yield from self._name(lane, SCORING)
                outcome = f"reward {work.reward}" if work.outcome == "reward" else work.outcome
                args = {"sample": str(work.sample), "outcome": outcome}
                yield _slice(lane, f"group {work.sample.prompt}", work, args)

    def _arrows(self, step: OptimizerStep) -> Iterator[TraceEvent]:
        """An arrow binds to the slice around its time; the end of a slice is already outside of it."""
        for prompt in dict.fromkeys(sample.prompt for sample in step.samples):
            if prompt in self._finished:
                lane, end_s = self._finished[prompt]
                self._num_arrows += 1
                common = {"name": "trained", "cat": "group", "id": self._num_arrows}
                yield {**common, "ph": "s", **_at(lane, end_s), "ts": _at(lane, end_s)["ts"] - 1}
                yield {**common, "ph": "f", "bp": "e", **_at(TRAINER, step.start_s)}

    def _pid(self, engine: str) -> int:
        return self._pids.setdefault(engine, RUN_PID + len(self._pids))

    def _name(self, lane: _Lane, process: str) -> Iterator[TraceEvent]:
        """Name a process and a lane of it, once."""
        if (whole := _Lane(lane.pid, 0)) not in self._named:
            self._named.add(whole)
            yield from self._process_name(lane.pid, process)
        if lane not in self._named:
            self._named.add(lane)
            kind = "sample" if process == SCORING else "slot"
            yield _label("thread_name", lane, name=f"{kind} {lane.tid}")

    def _process_name(self, pid: int, name: str) -> Iterator[TraceEvent]:
        yield _label("process_name", _Lane(pid, 0), name=name)
        yield _label("process_sort_index", _Lane(pid, 0), sort_index=pid)


def _slice(lane: _Lane, name: str, work: Interval, args: Mapping[str, object]) -> TraceEvent:
    start, end = _at(lane, work.start_s), _at(lane, work.end_s)
    return {"name": name, "ph": "X", **start, "dur": end["ts"] - start["ts"], "args": args}


def _mark(lane: _Lane, name: str, scope: str, time_s: float, args: Mapping[str, object]) -> TraceEvent:
    return {"name": name, "ph": "i", "s": scope, **_at(lane, time_s), "args": args}


def _label(kind: str, lane: _Lane, **args: object) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": lane.pid, "tid": lane.tid, "args": args}


def _at(lane: _Lane, time_s: float) -> dict[str, int]:
    return {"pid": lane.pid, "tid": lane.tid, "ts": max(0, round(time_s * 1e6))}
