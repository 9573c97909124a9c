"""Timeline: when engines and trainer were busy, as bars. `pictures.py` draws them. All times are seconds
since the start of the first round."""

from dataclasses import dataclass

from tailrace.record.events import (
    Accumulated,
    Event,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    Stepped,
)
from tailrace.record.lanes import Lanes
from tailrace.record.rows import RoundRow
from tailrace.types import SampleId

PICTURED_ROUNDS = 3
"""A picture of a long run shows its last rounds; the trace has all of them."""


@dataclass(frozen=True, slots=True)
class RequestBar:
    """A request, in a lane of its engine."""

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


class Timeline:
    """Sink behind a `StepMeter`: collects the bars of a run. Evaluations are left out."""

    def __init__(self) -> None:
        self.requests: list[RequestBar] = []
        self.trainer: list[TrainerBar] = []
        self.rounds: list[RoundSpan] = []
        self.steps: dict[int, int] = {}
        """The optimizer step that first trained a prompt's group, by prompt."""
        self.reports: list[RoundRow] = []
        self._origin_s: float | None = None
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
                self._end_request(event)
            case Accumulated():
                self._pending.append(event)
            case Stepped():
                self._step(event)
            case RoundRow():
                self.reports.append(event)
            case RoundStarted():
                if self._origin_s is None:
                    self._origin_s = event.time_s
                self._round_start_s = event.time_s
            case RoundEnded():
                self.rounds.append(RoundSpan(self._since(self._round_start_s), self._since(event.time_s)))

    def close(self) -> None:
        """Requests that have not ended are left out."""

    def _since(self, time_s: float) -> float:
        assert self._origin_s is not None
        return time_s - self._origin_s

    def _end_request(self, event: RequestEnded) -> None:
        started, lane = self._running.pop(event.sample)
        self._lanes[event.engine].give_back(lane)
        start_s, end_s = self._since(started.time_s), self._since(event.time_s)
        self.requests.append(RequestBar(event.engine, lane, event.sample.prompt, start_s, end_s))

    def _step(self, event: Stepped) -> None:
        step = event.stats.num_steps
        self._pending.append(event)
        self.trainer += [
            TrainerBar(step, self._since(work.start_s), self._since(work.end_s)) for work in self._pending
        ]
        self._pending.clear()
        for sample in event.stats.samples:
            self.steps.setdefault(sample.prompt, step)
