"""Timeline: when engines and trainer were busy, as bars. `pictures.py` draws them."""

import heapq
from dataclasses import dataclass, replace
from typing import TypeVar

from tailrace.record.events import (
    Accumulated,
    Event,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    Stepped,
)
from tailrace.record.figures import Row
from tailrace.types import SampleId

PICTURED_ROUNDS = 3
"""A picture of a long run shows its last rounds; the trace has all of them."""


@dataclass(frozen=True, slots=True)
class RequestBar:
    engine: str
    lane: int
    prompt: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TrainerBar:
    """Work of the trainer for an optimizer step: forward and backward, or the step itself."""

    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RoundSpan:
    start_s: float
    end_s: float


B = TypeVar("B", RequestBar, TrainerBar, RoundSpan)


class Lanes:
    """Hands out the lowest free lane, so there are as many lanes as requests that ran at once."""

    def __init__(self) -> None:
        self.num_lanes = 0
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.num_lanes += 1
        return self.num_lanes - 1

    def give_back(self, lane: int) -> None:
        heapq.heappush(self._free, lane)


class Timeline:
    """Sink behind a `StepMeter`: collects the bars of the last rounds. Evaluations are left out.

    Times are seconds on the run's clock until `close`, and then seconds since the start of the first round
    that is kept.
    """

    def __init__(self, max_rounds: int = PICTURED_ROUNDS) -> None:
        self.requests: list[RequestBar] = []
        self.trainer: list[TrainerBar] = []
        self.rounds: list[RoundSpan] = []
        self.steps: dict[int, int] = {}
        """The optimizer step that first trained a prompt's group, by prompt."""
        self.reports: list[Row] = []
        self._max_rounds = max_rounds
        self._round_start_s = 0.0
        self._lanes: dict[str, Lanes] = {}
        self._running: dict[SampleId, tuple[RequestStarted, int]] = {}
        self._pending: list[Accumulated | Stepped] = []
        """The trainer's work since the last step."""

    def on(self, event: Event) -> None:
        match event:
            case RequestStarted() if event.sample.prompt >= 0:
                lane = self._lanes.setdefault(event.engine, Lanes()).take()
                self._running[event.sample] = event, lane
            case RequestEnded() if event.sample in self._running:
                started, lane = self._running.pop(event.sample)
                self._lanes[event.engine].give_back(lane)
                prompt = event.sample.prompt
                self.requests.append(RequestBar(event.engine, lane, prompt, started.time_s, event.time_s))
            case Accumulated():
                self._pending.append(event)
            case Stepped():
                self._step(event)
            case dict() if "round/time_s" in event:
                self.reports.append(event)
            case RoundStarted():
                self._round_start_s = event.time_s
            case RoundEnded():
                self.rounds.append(RoundSpan(self._round_start_s, event.time_s))
                self._drop_earlier_rounds()

    def close(self) -> None:
        """Leave out requests that have not ended, and the trainer's work in a round that has not ended."""
        if self.rounds:
            origin_s, end_s = self.rounds[0].start_s, self.rounds[-1].end_s
            self.requests = [_since(origin_s, bar) for bar in self.requests]
            self.trainer = [_since(origin_s, bar) for bar in self.trainer if bar.end_s <= end_s]
            self.rounds = [_since(origin_s, span) for span in self.rounds]

    def _step(self, event: Stepped) -> None:
        step = event.stats.num_steps
        self.trainer += [TrainerBar(step, work.start_s, work.end_s) for work in [*self._pending, event]]
        self._pending.clear()
        for sample in event.stats.samples:
            self.steps.setdefault(sample.prompt, step)

    def _drop_earlier_rounds(self) -> None:
        self.rounds = self.rounds[-self._max_rounds :]
        start_s = self.rounds[0].start_s
        self.requests = [bar for bar in self.requests if bar.start_s >= start_s]
        self.trainer = [bar for bar in self.trainer if bar.start_s >= start_s]
        self.reports = [report for report in self.reports if report["round/end_s"] > start_s]
        kept = {bar.step for bar in self.trainer}
        self.steps = {prompt: step for prompt, step in self.steps.items() if step in kept}


def _since(origin_s: float, bar: B) -> B:
    return replace(bar, start_s=bar.start_s - origin_s, end_s=bar.end_s - origin_s)
