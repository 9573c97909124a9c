"""One life of a run, as its trace tells it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tailrace.page.bubbles import Activity
from tailrace.record.intervals import Intervals, union
from tailrace.record.trace import ROUNDS, RUN_PID, SCORING_PID, TRAINER, WEIGHTS
from tailrace.record.trace_reader import Defect, Record, TraceReader

EVALUATION, UNFINISHED = "evaluation", "unfinished"


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
    """A slice of the run's own lanes: a round, work of the trainer, a publication."""

    name: str
    start_s: float
    end_s: float


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
    trainer: list[Work] = field(default_factory=list)
    publications: list[Work] = field(default_factory=list)
    scoring: list[tuple[float, float]] = field(default_factory=list)
    open_scoring: list[tuple[float, float]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    end_s: float = 0.0

    def __post_init__(self) -> None:
        self._reader = TraceReader(self.path)
        self._processes: dict[int, str] = {}
        self.end_s = self.offset_s

    @property
    def defects(self) -> Sequence[Defect]:
        found = list(self._reader.defects)
        for end, start in self._reader.gaps:
            problem = f"files between {end / 1e6:.1f} s and {start / 1e6:.1f} s are no longer kept"
            found.append(Defect(self.path.name, 0, problem))
        return found

    @property
    def num_records(self) -> int:
        return len(self.requests) + len(self.trainer) + len(self.rounds) + len(self.scoring)

    def was_replaced(self) -> bool:
        return self._reader.was_replaced()

    def update(self) -> bool:
        """Read what is new; return whether there was something."""
        records = self._reader.read()
        for record in records:
            self._take(record)
        unfinished = self._reader.unfinished
        self.end_s = max([self.end_s, *(self._seconds(each.ts) for each in unfinished)])
        before = self.unfinished, self.open_rounds, self.open_scoring
        self._take_unfinished(unfinished)
        return bool(records) or before != (self.unfinished, self.open_rounds, self.open_scoring)

    def activity(self) -> Activity:
        """What it did, for the causes of its bubbles."""
        everything = [*self.requests, *self.unfinished]
        gaps = self._reader.gaps
        names = sorted({request.engine for request in everything} | {state.engine for state in self.states})
        return Activity(
            start_s=min((work.start_s for work in [*self.rounds, *self.open_rounds]), default=self.offset_s),
            end_s=self.end_s,
            requests=_by_engine(everything, names),
            evaluations=_times(each for each in everything if each.outcome == EVALUATION),
            rollouts=_times(each for each in everything if each.outcome != EVALUATION),
            scoring=np.array([*self.scoring, *self.open_scoring]).reshape(-1, 2),
            trainer=_times(self.trainer),
            publications=_times(self.publications),
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
        if record.pid == RUN_PID:
            lanes = ((ROUNDS, self.rounds), (TRAINER, self.trainer), (WEIGHTS, self.publications))
            for lane, works in lanes:
                if lane == (record.pid, record.tid):
                    works.append(Work(record.name, start_s, end_s))
        elif record.pid == SCORING_PID:
            self.scoring.append((start_s, end_s))
        else:
            self.requests.append(self._request(record, end_s))

    def _take_instant(self, record: Record) -> None:
        time_s = self._seconds(record.ts)
        self.end_s = max(self.end_s, time_s)
        if record.pid != RUN_PID:
            engine, state = self._processes.get(record.pid, "?"), record.name.rpartition(" ")[2]
            self.states.append(State(engine, time_s, state, str(record.args.get("why", ""))))
        elif "waiting" in record.args:
            self.waits.append(Wait(time_s, record.name, str(record.args["waiting"])))

    def _take_unfinished(self, records: Iterable[Record]) -> None:
        self.unfinished, self.open_rounds, self.open_scoring = [], [], []
        for record in records:
            start_s = self._seconds(record.ts)
            if (record.pid, record.tid) == ROUNDS:
                self.open_rounds.append(Work(record.name, start_s, self.end_s))
            elif record.pid == SCORING_PID:
                self.open_scoring.append((start_s, self.end_s))
            elif record.pid != RUN_PID:
                self.unfinished.append(self._request(record, self.end_s))

    def _request(self, record: Record, end_s: float) -> Request:
        args = record.args
        had = int(args.get("had", 0))
        return Request(
            engine=self._processes.get(record.pid, "?"),
            slot=record.tid,
            start_s=self._seconds(record.ts),
            end_s=end_s,
            outcome=EVALUATION if record.name == EVALUATION else str(args.get("outcome", UNFINISHED)),
            sample=str(args.get("sample", "")),
            tokens=int(args.get("tokens", had)),
            had=had,
        )


def stragglers(life: Life) -> list[Straggler]:
    """The straggler of each round in which at least two samples ended."""
    ended = [request for request in life.requests if request.outcome in ("stop", "length")]
    ends = np.array([request.end_s for request in ended])
    found = []
    for work in life.rounds:
        first, behind = np.searchsorted(ends, [work.start_s, work.end_s], side="right")
        mine = [each for each in ended[first:behind] if each.start_s >= work.start_s]
        if len(mine) > 1:
            before, last = mine[-2:]
            alone_s = last.end_s - before.end_s
            found.append(
                Straggler(work.name, last.sample, last.engine, last.slot, last.end_s, last.tokens, alone_s)
            )
    return found


def _times(of: Iterable[Request | Work]) -> Intervals:
    return np.array([(each.start_s, each.end_s) for each in of]).reshape(-1, 2)


def _by_engine(requests: Iterable[Request], names: Sequence[str]) -> dict[str, Intervals]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for request in requests:
        found[request.engine].append((request.start_s, request.end_s))
    return {name: np.array(times).reshape(-1, 2) for name, times in found.items()}
