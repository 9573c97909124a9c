"""One life of a run, as its trace tells it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from tailrace.page.bubbles import Activity
from tailrace.record.intervals import Intervals, union
from tailrace.record.trace import ROUNDS, RUN_PID, SCORING_PID, TRAINER, WAITS, WEIGHTS
from tailrace.record.trace_reader import Defect, Record, TraceReader

EVALUATION, UNFINISHED = "evaluation", "unfinished"
TRAINING, PUBLISHING = ("Accumulate", "Step"), "Publish"
"""What the trainer's process is asked for, at the end of the name of a wait."""
RESPONSES = ("stop", "length")
"""Outcomes of requests that ended with their response."""


class Request(NamedTuple):
    """A sample on an engine: a span of the page. Times are seconds since the run's first event."""

    engine: str
    slot: int
    start_s: float
    end_s: float
    outcome: str
    """'stop', 'length', 'cancelled' or 'evicted'; 'unfinished'; 'evaluation' for held-out prompts."""
    sample: str
    tokens: int
    """Completion tokens at its end; at its start, if it is unfinished."""
    had: int
    """Completion tokens at its start."""


class Work(NamedTuple):
    """A round, work of the trainer, a publication, a wait; or a sample that waits for its reward."""

    name: str
    start_s: float
    end_s: float


Span = TypeVar("Span", bound=Request | Work)


class State(NamedTuple):
    """An engine changed its state."""

    engine: str
    time_s: float
    state: str
    why: str


class Wait(NamedTuple):
    """The run said that no optimizer step had come for long."""

    time_s: float
    name: str
    what: str


class Straggler(NamedTuple):
    """The sample that ended last in a round, of those that were generated in it."""

    round: str
    sample: str
    engine: str
    slot: int
    end_s: float
    tokens: int
    alone_s: float
    """How long after the one before it."""


@dataclass
class Life:
    """Grows with each `update`.

    Args:
        path: the first file of its trace.
        offset_s: seconds since the run's first event at which it began; the time between two lives is not
            counted.
    """

    path: Path
    offset_s: float
    requests: list[Request] = field(default_factory=list)
    """In the order in which they ended."""
    unfinished: list[Request] = field(default_factory=list)
    rounds: list[Work] = field(default_factory=list)
    open_rounds: list[Work] = field(default_factory=list)
    open_waits: list[Work] = field(default_factory=list)
    """What tasks of a live run waited for when it last wrote."""
    trainer: list[Work] = field(default_factory=list)
    publications: list[Work] = field(default_factory=list)
    scoring: list[Work] = field(default_factory=list)
    open_scoring: list[Work] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    """The highest slot of each engine."""
    states: list[State] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    end_s: float = 0.0
    num_responses: int = 0
    """Requests that ended with their response, and the tokens of these responses."""
    num_response_tokens: int = 0
    longest_request_s: float = 0.0
    worked_s: float = 0.0
    """When work of a device, or a reward, last ended."""
    changed_s: float = 0.0
    """What was before is the same as before the last `update`."""

    def __post_init__(self) -> None:
        self._reader = TraceReader(self.path)
        self._processes: dict[int, str] = {}
        self._num_gaps = 0
        self.end_s = self.offset_s

    @property
    def defects(self) -> Sequence[Defect]:
        found = list(self._reader.defects)
        for end, start in self._reader.gaps:
            problem = f"files between {end / 1e6:.1f} s and {start / 1e6:.1f} s are no longer kept"
            found.append(Defect(self.path.name, 0, problem))
        return found

    def was_replaced(self) -> bool:
        return self._reader.was_replaced()

    def update(self) -> bool:
        """Read what is new; return whether there was something."""
        before = self._open()
        self.changed_s = min((self.end_s, *(each.start_s for each in self._at_work())))
        records = self._reader.read()
        for record in records:
            self._take(record)
        self._take_unfinished(self._reader.unfinished)
        gaps = self._reader.gaps[self._num_gaps :]
        self._num_gaps += len(gaps)
        starts = [*(self._seconds(end) for end, _ in gaps), *(each.start_s for each in self._at_work())]
        self.changed_s = min((self.changed_s, *starts))
        return bool(records) or before != self._open()

    @property
    def is_closed(self) -> bool:
        return not any(self._open())

    def _open(self) -> tuple[object, ...]:
        return self.unfinished, self.open_rounds, self.open_scoring, self.open_waits

    def _at_work(self) -> Sequence[Request | Work]:
        return [*self.unfinished, *self.open_scoring, *self.open_trainer, *self.open_publications]

    @property
    def open_trainer(self) -> Sequence[Work]:
        return [wait for wait in self.open_waits if verb_of(wait) in TRAINING]

    @property
    def open_publications(self) -> Sequence[Work]:
        return [wait for wait in self.open_waits if verb_of(wait) == PUBLISHING]

    @property
    def start_s(self) -> float:
        return min((work.start_s for work in [*self.rounds[:1], *self.open_rounds]), default=self.offset_s)

    def activity(self, since_s: float = -math.inf) -> Activity:
        """What it did after a time, for the causes of its bubbles. What began before it is whole."""
        everything = [*_after(self.requests, since_s), *self.unfinished]
        gaps = self._reader.gaps
        names = sorted(self.slots)
        return Activity(
            start_s=max(self.start_s, since_s),
            end_s=self.end_s,
            requests=_by_engine(everything, names),
            evaluations=_times(each for each in everything if each.outcome == EVALUATION),
            rollouts=_times(each for each in everything if each.outcome != EVALUATION),
            scoring=union(_times([*_after(self.scoring, since_s), *self.open_scoring])),
            trainer=_times([*_after(self.trainer, since_s), *self.open_trainer]),
            publications=_times([*_after(self.publications, since_s), *self.open_publications]),
            dead=self._in_state("dead"),
            asleep=self._in_state("asleep"),
            unrecorded=union([(self._seconds(end), self._seconds(start)) for end, start in gaps]),
        )

    def _in_state(self, wanted: str) -> dict[str, Intervals]:
        found: dict[str, Intervals] = {}
        for engine in {state.engine for state in self.states}:
            mine = [state for state in self.states if state.engine == engine]
            ends = [*(state.time_s for state in mine[1:]), self.end_s]
            found[engine] = union(
                [(state.time_s, end) for state, end in zip(mine, ends, strict=True) if state.state == wanted]
            )
        return found

    def _seconds(self, microseconds: int) -> float:
        return self.offset_s + microseconds / 1e6

    def _take(self, record: Record) -> None:
        if record.name == "process_name":
            self._processes[record.pid] = str(record.args.get("name"))
        elif record.ph == "i":
            self._take_instant(record)
        elif record.ph == "X":
            self._take_slice(record)

    def _take_slice(self, record: Record) -> None:
        start_s, end_s = self._seconds(record.ts), self._seconds(record.end)
        self.end_s = max(self.end_s, end_s)
        work, lane = Work(record.name, start_s, end_s), (record.pid, record.tid)
        if lane == ROUNDS:
            self.rounds.append(work)
            self._find_straggler(work)
            return
        self.changed_s = min(self.changed_s, start_s)
        if record.name != "late":  # of the controller's lane
            self.worked_s = max(self.worked_s, end_s)
        if lane == TRAINER:
            self.trainer.append(work)
        elif lane == WEIGHTS:
            self.publications.append(work)
        elif record.pid == SCORING_PID:
            self.scoring.append(work)
        elif record.pid != RUN_PID:
            self.take_request(self._request(record, end_s))

    def take_request(self, request: Request) -> None:
        """Add a request that has ended."""
        self.requests.append(request)
        if request.outcome == EVALUATION:
            return
        self.longest_request_s = max(self.longest_request_s, request.end_s - request.start_s)
        if request.outcome in RESPONSES:
            self.num_responses += 1
            self.num_response_tokens += request.tokens

    def _find_straggler(self, work: Work) -> None:
        """Of a round that has just ended; there is one where at least two samples ended in it."""
        ended = (each for each in _after(self.requests, work.start_s) if each.outcome in RESPONSES)
        mine = [each for each in ended if each.start_s >= work.start_s and each.end_s <= work.end_s]
        if len(mine) > 1:
            before, last = mine[-2:]
            alone_s = last.end_s - before.end_s
            self.stragglers.append(
                Straggler(work.name, last.sample, last.engine, last.slot, last.end_s, last.tokens, alone_s)
            )

    def _take_instant(self, record: Record) -> None:
        time_s = self._seconds(record.ts)
        self.end_s, self.changed_s = max(self.end_s, time_s), min(self.changed_s, time_s)
        if record.pid != RUN_PID:
            engine, state = self._processes.get(record.pid, "?"), record.name.rpartition(" ")[2]
            self.slots.setdefault(engine, 0)
            self.states.append(State(engine, time_s, state, str(record.args.get("why", ""))))
        elif "waiting" in record.args:
            self.waits.append(Wait(time_s, record.name, str(record.args["waiting"])))

    def _take_unfinished(self, records: Iterable[Record]) -> None:
        self.unfinished, self.open_rounds, self.open_scoring, self.open_waits = [], [], [], []
        self.end_s = max((self.end_s, *(self._seconds(record.ts) for record in records)))
        works = {ROUNDS: self.open_rounds, WAITS: self.open_waits}
        for record in records:
            work, lane = Work(record.name, self._seconds(record.ts), self.end_s), (record.pid, record.tid)
            if lane in works:
                works[lane].append(work)
            elif record.pid == SCORING_PID:
                self.open_scoring.append(work._replace(name=str(record.args.get("sample", "?"))))
            elif record.pid != RUN_PID:
                self.unfinished.append(self._request(record, self.end_s))

    def _request(self, record: Record, end_s: float) -> Request:
        args, engine = record.args, self._processes.get(record.pid, "?")
        had = int(args.get("had", 0))
        self.slots[engine] = max(record.tid, self.slots.get(engine, 0))
        return Request(
            engine=engine,
            slot=record.tid,
            start_s=self._seconds(record.ts),
            end_s=end_s,
            outcome=EVALUATION if record.name == EVALUATION else str(args.get("outcome", UNFINISHED)),
            sample=str(args.get("sample", "")),
            tokens=int(args.get("tokens", had)),
            had=had,
        )


def verb_of(wait: Work) -> str:
    """What a process is asked for: 'Step' of 'trainer: Step'."""
    return wait.name.partition(": ")[2]


def _after(ended: Sequence[Span], since_s: float) -> Sequence[Span]:
    """What ended after a time, of what is sorted by its end."""
    return [*takewhile(lambda each: each.end_s > since_s, reversed(ended))][::-1]


def _times(of: Iterable[Request | Work]) -> Intervals:
    return np.array([(each.start_s, each.end_s) for each in of]).reshape(-1, 2)


def _by_engine(requests: Iterable[Request], names: Sequence[str]) -> dict[str, Intervals]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for request in requests:
        found[request.engine].append((request.start_s, request.end_s))
    return {name: np.array(times).reshape(-1, 2) for name, times in found.items()}
