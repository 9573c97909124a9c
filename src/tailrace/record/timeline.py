"""The timeline of a run: its events folded into what took time, and what is still open."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from tailrace.record import events
from tailrace.record.events import Interval
from tailrace.record.run_log import LogReader
from tailrace.types import SampleId

UNFINISHED = "unfinished"
RESPONSES = ("stop", "length")
"""Outcomes of requests that ended with their response."""


class ServedRequest(Interval, frozen=True):
    """One request: an engine's work on a sample without a pause."""

    sample: SampleId
    engine: str
    slot: int
    """The lowest that was free when it began, from 1."""
    had: int
    """Completion tokens at its start."""
    num_tokens: int
    """Completion tokens at its end; while it is open, those at its start."""
    outcome: str = UNFINISHED
    """'stop', 'length', 'cancelled' or 'evicted'; 'unfinished' while it is open."""

    @property
    def num_gained(self) -> int:
        return self.num_tokens - self.had

    @property
    def is_evaluation(self) -> bool:
        return self.sample.is_held_out

    @property
    def is_response(self) -> bool:
        """Whether it ended with the response of a sample that may be trained."""
        return self.outcome in RESPONSES and not self.is_evaluation


class Scoring(Interval, frozen=True):
    """A sample between the end of its generation and its reward."""

    sample: SampleId
    slot: int
    reward: float | None = None
    outcome: str = UNFINISHED
    """'reward', 'next turn', or the reason why it has no reward; 'unfinished' while it is open."""


class RoundSpan(Interval, frozen=True):
    round: int
    version: int

    @property
    def name(self) -> str:
        """Its name for a person, who counts rounds from 1."""
        return f"round {self.round + 1}"


Paired: TypeAlias = ServedRequest | Scoring | RoundSpan
"""Work whose begin and end are two events. That of the trainer is one event, an interval."""
P = TypeVar("P", ServedRequest, Scoring, RoundSpan)


class Lanes:
    """Hands out the lowest free lane, from 1: there are as many lanes as requests that ran at once."""

    def __init__(self) -> None:
        self.num_lanes = 0
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.num_lanes += 1
        return self.num_lanes

    def give_back(self, lane: int) -> None:
        heapq.heappush(self._free, lane)


class Pairs:
    """Pairs the events that begin and end work of one process of a run. An end without a begin is ignored."""

    def __init__(self) -> None:
        self.requests: dict[SampleId, ServedRequest] = {}
        """The open ones, in the order in which they began, as the others."""
        self.scorings: dict[SampleId, Scoring] = {}
        self.round: RoundSpan | None = None
        self.engines: dict[str, Lanes] = {}
        """The slots of each engine."""
        self._scorers = Lanes()

    def on(self, event: events.Event) -> Paired | None:
        """Take an event; return what it ended."""
        match event:
            case events.RequestStarted(now_s, sample, engine, had):
                slot = self.engines.setdefault(engine, Lanes()).take()
                self.requests[sample] = ServedRequest(now_s, now_s, sample, engine, slot, had, had)
                return self._end_scoring(sample, now_s, "next turn")
            case events.RequestEnded() if event.sample in self.requests:
                return self._end_request(event)
            case events.SampleScored(now_s, sample, reward, failure):
                return self._end_scoring(sample, now_s, failure or "reward", reward)
            case events.TokensWasted(now_s, sample, _, reason):
                return self._end_scoring(sample, now_s, reason)
            case events.RoundStarted(now_s, round, version):
                self.round = RoundSpan(now_s, now_s, round, version)
            case events.RoundEnded() if self.round:
                ended, self.round = replace(self.round, end_s=event.time_s), None
                return ended
        return None

    def _end_request(self, event: events.RequestEnded) -> ServedRequest:
        begun = self.requests.pop(event.sample)
        self.engines[begun.engine].give_back(begun.slot)
        now_s, tokens = event.time_s, event.num_tokens
        ended = replace(begun, end_s=now_s, num_tokens=tokens, outcome=event.outcome)
        if ended.is_response:
            self.scorings[event.sample] = Scoring(now_s, now_s, event.sample, self._scorers.take())
        return ended

    def _end_scoring(
        self, sample: SampleId, now_s: float, outcome: str, reward: float | None = None
    ) -> Scoring | None:
        if (begun := self.scorings.pop(sample, None)) is None:
            return None
        self._scorers.give_back(begun.slot)
        return replace(begun, end_s=now_s, outcome=outcome, reward=reward)


_LISTS: Mapping[type, str] = {
    ServedRequest: "requests",
    Scoring: "scorings",
    RoundSpan: "rounds",
    events.ReferenceScored: "references",
    events.Decoded: "decoded",
    events.Accumulated: "passes",
    events.OptimizerStep: "steps",
    events.Published: "publications",
    events.WeightsProbed: "probes",
    events.EngineStateChanged: "states",
    events.Evaluated: "evaluations",
    events.Saved: "saved",
    events.Waiting: "alarms",
    events.ControllerLag: "lags",
    events.StagesFilled: "stages",
}
"""The list of a `Timeline` that has what is of a type."""


@dataclass
class Timeline:
    """Work of one process of a run, in the order in which it ended."""

    life: int = 1
    """The number of the process in the run."""
    start_s: float = 0.0
    end_s: float = 0.0
    """Time of its last event."""
    requests: list[ServedRequest] = field(default_factory=list)
    scorings: list[Scoring] = field(default_factory=list)
    references: list[events.ReferenceScored] = field(default_factory=list)
    rounds: list[RoundSpan] = field(default_factory=list)
    decoded: list[events.Decoded] = field(default_factory=list)
    passes: list[events.Accumulated] = field(default_factory=list)
    steps: list[events.OptimizerStep] = field(default_factory=list)
    publications: list[events.Published] = field(default_factory=list)
    probes: list[events.WeightsProbed] = field(default_factory=list)
    states: list[events.EngineStateChanged] = field(default_factory=list)
    evaluations: list[events.Evaluated] = field(default_factory=list)
    saved: list[events.Saved] = field(default_factory=list)
    alarms: list[events.Waiting] = field(default_factory=list)
    lags: list[events.ControllerLag] = field(default_factory=list)
    stages: list[events.StagesFilled] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)
    """Open waits of a live run's tasks when it last wrote, with their starts."""
    is_closed: bool = False
    """Whether the process came to its end."""
    pairs: Pairs = field(default_factory=Pairs)

    def on(self, event: events.LoggedEvent) -> None:
        self.end_s = max(self.end_s, events.time_of(event))
        for each in (event, self.pairs.on(event)):
            if name := _LISTS.get(type(each)):
                getattr(self, name).append(each)
        if isinstance(event, events.OpenWaits):
            self.waits = event.since_s
        elif isinstance(event, events.BooksClosed):
            self.is_closed, self.waits = True, {}

    @property
    def first_round_s(self) -> float:
        """Start of its first round."""
        return next((round.start_s for round in (*self.rounds, *self.open_rounds)), self.start_s)

    @property
    def trainer(self) -> Sequence[events.Accumulated | events.OptimizerStep]:
        """The trainer's work in the order in which it ended."""
        return sorted([*self.passes, *self.steps], key=lambda work: (work.end_s, work.start_s))

    @property
    def slots(self) -> Mapping[str, int]:
        """The highest slot of each engine that did something."""
        slots = {engine: lanes.num_lanes for engine, lanes in self.pairs.engines.items()}
        return {state.engine: 0 for state in self.states} | slots

    @property
    def open_rounds(self) -> Sequence[RoundSpan]:
        return self._until_now([self.pairs.round] if self.pairs.round else [])

    @property
    def open_requests(self) -> Sequence[ServedRequest]:
        return self._until_now(self.pairs.requests.values())

    @property
    def open_scorings(self) -> Sequence[Scoring]:
        return self._until_now(self.pairs.scorings.values())

    def open_calls(self, *verbs: str) -> Sequence[Interval]:
        """Return the calls (`verb_of`) that worker processes had not finished."""
        since = [since_s for what, since_s in self.waits.items() if verb_of(what) in verbs]
        return [Interval(since_s, self.end_s) for since_s in since]

    def _until_now(self, opened: Iterable[P]) -> Sequence[P]:
        return [replace(each, end_s=self.end_s) for each in opened]


def verb_of(wait: str) -> str:
    """Return the call that a wait stands for: 'step' for 'trainer: Step'."""
    return wait.rpartition(": ")[2].rpartition(".")[2].lower()


class RunTimelines:
    """Timelines of the processes in events.jsonl, also of a run that goes on. `LogReader` explains times."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.reader = LogReader(self._path)
        self.all: list[Timeline] = []

    def update(self) -> None:
        """Read what was appended since the last time. Raises as `LogReader.read`."""
        if self.reader.was_replaced():
            self._begin()
        for event in self.reader.read():
            if isinstance(event, events.RunStarted):
                self.all.append(Timeline(event.life, event.time_s, event.time_s))
            self.all[-1].on(event)
