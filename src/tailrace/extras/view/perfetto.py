"""A run as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

One process is the run, with lanes for rounds, trainer, weights, the controller's lag and what it waited for
at the end. One is the scoring stage: a sample has a lane there from the end of its generation to its reward,
and in it the time of its reference or teacher.
Each engine is a process with a lane for each of its slots; a mark across it tells that it died, fell asleep
or opened. An arrow goes from the last request of a group to each step that trains it. Times are microseconds
since the run's first event; the time between two processes of a run is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tailrace.record.events import Interval, OptimizerStep
from tailrace.record.timeline import RunTimelines, ServedRequest, Timeline

TraceEvent: TypeAlias = dict[str, Any]
"""A record of the trace-event format."""


class _Lane(NamedTuple):
    pid: int
    tid: int


RUN_PID, SCORING_PID = 1, 10_000
LANES = ("rounds", "trainer", "weights", "controller", "waits")
ROUNDS, TRAINER, WEIGHTS, CONTROLLER, WAITS = (_Lane(RUN_PID, tid) for tid, _ in enumerate(LANES, 1))


def write_perfetto(log: Path, path: Path) -> None:
    """Write the trace of events.jsonl, a JSON array. Raises a ConfigError if the log has a bad line."""
    run = RunTimelines(log)
    run.update()
    with path.open("wb") as file:
        separator = b"[\n"
        for record in trace_events(run.all):
            file.write(separator + msgspec.json.encode(record))
            separator = b",\n"
        file.write(b"\n]\n")


def trace_events(processes: Sequence[Timeline]) -> Iterator[TraceEvent]:
    """The trace of the processes of a run."""
    engines = dict.fromkeys(engine for process in processes for engine in process.slots)
    pids = {engine: pid for pid, engine in enumerate(engines, RUN_PID + 1)}
    yield from _named(RUN_PID, "run", LANES)
    for engine, pid in pids.items():
        num_slots = max(process.slots.get(engine, 0) for process in processes)
        yield from _named(pid, engine, [f"slot {number}" for number in range(1, num_slots + 1)])
    scorings = [each for process in processes for each in (*process.scorings, *process.open_scorings)]
    num_lanes = max((each.slot for each in scorings), default=0)
    yield from _named(SCORING_PID, "scoring", [f"sample {number}" for number in range(1, num_lanes + 1)])
    for each in scorings:
        outcome = f"reward {each.reward}" if each.outcome == "reward" else each.outcome
        args = {"sample": str(each.sample), "outcome": outcome}
        yield _slice(_Lane(SCORING_PID, each.slot), f"group {each.sample.prompt}", each, args)
    slots = {each.sample: each.slot for each in scorings}
    for told in (told for process in processes for told in process.references if told.sample in slots):
        yield _slice(_Lane(SCORING_PID, slots[told.sample]), "reference", told, {"tokens": told.num_tokens})
    ids = count(1)
    for process in processes:
        yield from _work_of_the_run(process)
        yield from _work_of_engines(process, pids)
        yield from _arrows(process, pids, ids)


def _work_of_the_run(process: Timeline) -> Iterator[TraceEvent]:
    for round in (*process.rounds, *process.open_rounds):
        yield _slice(ROUNDS, round.name, round, {"version": round.version})
    for work in process.trainer:
        args: dict[str, object] = {"samples": len(work.samples), "tokens": work.num_tokens}
        if isinstance(work, OptimizerStep):
            yield _slice(TRAINER, f"step {work.number}", work, args | {"loss": work.loss})
        else:
            yield _slice(TRAINER, "accumulate", work, args)
    for publication in process.publications:
        yield _slice(WEIGHTS, f"publish {publication.version}", publication, {})
    for lag in process.lags:
        yield _slice(CONTROLLER, "late", Interval(lag.time_s - lag.lag_s, lag.time_s), {})
    for what, since_s in sorted(process.waits.items(), key=lambda wait: wait[1]):
        yield _slice(WAITS, what, Interval(since_s, process.end_s), {})
    for alarm in process.alarms:
        name = f"no optimizer step for {alarm.quiet_s:.0f} s"
        yield _mark(ROUNDS, name, "t", alarm.time_s, {"waiting": alarm.what})
    for evaluated in process.evaluations:
        yield _mark(ROUNDS, f"held-out reward {evaluated.reward:.3f}", "t", evaluated.time_s, {})


def _work_of_engines(process: Timeline, pids: Mapping[str, int]) -> Iterator[TraceEvent]:
    for each in (*process.requests, *process.open_requests):
        counts = {"tokens": each.num_tokens, "had": each.had}
        args = {"sample": str(each.sample), **counts, "outcome": each.outcome}
        name = "evaluation" if each.is_evaluation else f"group {each.sample.prompt}"
        yield _slice(_Lane(pids[each.engine], each.slot), name, each, args)
    for state in process.states:
        name, lane = f"{state.engine} is {state.state}", _Lane(pids[state.engine], 0)
        yield _mark(lane, name, "p", state.time_s, {"why": state.why})


def _arrows(process: Timeline, pids: Mapping[str, int], ids: Iterator[int]) -> Iterator[TraceEvent]:
    """An arrow binds to the slice around its time; the end of a slice is already outside of it."""
    responses: dict[int, list[ServedRequest]] = {}
    for request in process.requests:
        if request.is_response:
            responses.setdefault(request.sample.prompt, []).append(request)
    for step in process.steps:
        for prompt in dict.fromkeys(sample.prompt for sample in step.samples):
            ended = [each for each in responses.get(prompt, ()) if each.end_s <= step.end_s]
            for last in ended[-1:]:
                common = {"name": "trained", "cat": "group", "id": next(ids)}
                lane = _Lane(pids[last.engine], last.slot)
                yield {**common, "ph": "s", **_at(lane, last.end_s), "ts": _at(lane, last.end_s)["ts"] - 1}
                yield {**common, "ph": "f", "bp": "e", **_at(TRAINER, step.start_s)}


def _named(pid: int, process: str, lanes: Sequence[str]) -> Iterator[TraceEvent]:
    whole = {"ph": "M", "pid": pid, "tid": 0}
    yield {"name": "process_name", **whole, "args": {"name": process}}
    yield {"name": "process_sort_index", **whole, "args": {"sort_index": pid}}
    for tid, name in enumerate(lanes, 1):
        yield {"name": "thread_name", **whole, "tid": tid, "args": {"name": name}}


def _slice(lane: _Lane, name: str, work: Interval, args: Mapping[str, object]) -> TraceEvent:
    start, end = _at(lane, work.start_s), _at(lane, work.end_s)
    return {"name": name, "ph": "X", **start, "dur": end["ts"] - start["ts"], "args": args}


def _mark(lane: _Lane, name: str, scope: str, time_s: float, args: Mapping[str, object]) -> TraceEvent:
    return {"name": name, "ph": "i", "s": scope, **_at(lane, time_s), "args": args}


def _at(lane: _Lane, time_s: float) -> dict[str, int]:
    return {**lane._asdict(), "ts": max(0, round(time_s * 1e6))}
