"""trace.json: the run as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

One process for the run, with a lane each for rounds, trainer and weights; one an engine, with a lane a
slot. An arrow goes from the last request of a group to each step that trains it. Times are microseconds
since the first event.

The file is a JSON array that is streamed. The viewers also load it without its end, so the trace of a
killed run is good. Equal events make equal bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.record.events import (
    Accumulated,
    Evaluated,
    Event,
    GroupEnded,
    Published,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    Stepped,
    time_of,
)
from tailrace.record.lanes import Lanes
from tailrace.types import SampleId


class _Lane(NamedTuple):
    pid: int
    tid: int


RUN_PID = 1
ROUNDS, TRAINER, WEIGHTS = _Lane(RUN_PID, 1), _Lane(RUN_PID, 2), _Lane(RUN_PID, 3)


@dataclass(frozen=True, slots=True)
class _Request:
    event: RequestStarted
    lane: _Lane


class TraceWriter:
    """Sink: streams the trace to a file, and ends it at close."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._separator = b"[\n"
        self._origin_s: float | None = None
        self._now_s = 0.0
        self._round: RoundStarted | None = None
        self._pids: dict[str, int] = {}
        self._lanes: dict[str, Lanes] = {}
        self._running: dict[SampleId, _Request] = {}
        self._finished: dict[int, tuple[_Lane, float]] = {}
        """By prompt, where and when the last request of its group ended."""
        self._ended: list[int] = []
        """Prompts whose groups ended in this round."""
        self._num_flows = 0
        self._name_process(RUN_PID, "run")
        for lane, name in ((ROUNDS, "rounds"), (TRAINER, "trainer"), (WEIGHTS, "weights")):
            self._name_lane(lane, name)

    def on(self, event: Event) -> None:
        self._now_s = time_of(event)
        if self._origin_s is None:
            self._origin_s = self._now_s
        match event:
            case RequestStarted():
                self._running[event.sample] = _Request(event, self._take_lane(event.engine))
            case RequestEnded():
                self._end_request(event.sample, event.num_tokens, event.outcome)
            case GroupEnded():
                self._ended.append(event.prompt)
            case Accumulated():
                args = {"samples": len(event.samples), "tokens": event.num_tokens}
                self._slice(TRAINER, "accumulate", event.start_s, event.end_s, args)
            case Stepped():
                self._step(event)
            case Published():
                self._slice(WEIGHTS, f"publish {event.version}", event.start_s, event.end_s, {})
            case RoundStarted():
                self._round = event
            case RoundEnded():
                self._end_round()
            case Evaluated():
                name = f"accuracy {event.accuracy:.3f}"
                self._put({"name": name, "ph": "i", "s": "t", **self._at(ROUNDS, event.time_s)})

    def close(self) -> None:
        """What still runs ends at the last moment seen."""
        for sample, request in list(self._running.items()):
            self._end_request(sample, request.event.num_tokens, "unfinished")
        self._end_round()
        self._file.write(b"\n]\n")
        self._file.close()

    def _take_lane(self, engine: str) -> _Lane:
        if engine not in self._pids:
            self._pids[engine] = RUN_PID + 1 + len(self._pids)
            self._lanes[engine] = Lanes()
            self._name_process(self._pids[engine], engine)
        lanes, known = self._lanes[engine], self._lanes[engine].num_lanes
        lane = _Lane(self._pids[engine], lanes.take() + 1)
        if lanes.num_lanes > known:
            self._name_lane(lane, f"slot {lane.tid}")
        return lane

    def _end_request(self, sample: SampleId, num_tokens: int, outcome: str) -> None:
        request = self._running.pop(sample)
        started = request.event
        self._lanes[started.engine].give_back(request.lane.tid - 1)
        args = {"sample": str(sample), "tokens": num_tokens, "had": started.num_tokens, "outcome": outcome}
        name = f"group {sample.prompt}" if sample.prompt >= 0 else "evaluation"
        self._slice(request.lane, name, started.time_s, self._now_s, args)
        if sample.prompt >= 0 and outcome in ("stop", "length"):
            self._finished[sample.prompt] = (request.lane, self._now_s)

    def _step(self, event: Stepped) -> None:
        stats = event.stats
        args = {"samples": len(stats.samples), "tokens": stats.num_tokens, "loss": stats.loss}
        self._slice(TRAINER, f"step {stats.num_steps}", event.start_s, event.end_s, args)
        for prompt in dict.fromkeys(sample.prompt for sample in stats.samples):
            if prompt in self._finished:
                self._flow(*self._finished[prompt], event.start_s)

    def _flow(self, lane: _Lane, end_s: float, step_s: float) -> None:
        """An arrow binds to the slice around its time, and a slice's end is already outside of it."""
        self._num_flows += 1
        common = {"name": "trained", "cat": "group", "id": self._num_flows}
        start = self._at(lane, end_s)
        start["ts"] -= 1
        self._put({**common, "ph": "s", **start})
        self._put({**common, "ph": "f", "bp": "e", **self._at(TRAINER, step_s)})

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
        self._put({"name": name, "ph": "X", **start, "dur": end["ts"] - start["ts"], "args": args})

    def _at(self, lane: _Lane, time_s: float) -> dict[str, int]:
        assert self._origin_s is not None
        return {"pid": lane.pid, "tid": lane.tid, "ts": round((time_s - self._origin_s) * 1e6)}

    def _name_process(self, pid: int, name: str) -> None:
        self._put({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        self._put(
            {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        )

    def _name_lane(self, lane: _Lane, name: str) -> None:
        self._put(
            {"name": "thread_name", "ph": "M", "pid": lane.pid, "tid": lane.tid, "args": {"name": name}}
        )

    def _put(self, record: Mapping[str, object]) -> None:
        self._file.write(self._separator)
        self._file.write(msgspec.json.encode(record))
        self._separator = b",\n"
