"""Timeline: who was busy when, in compact bars. `pictures.py` draws them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
from tailrace.record.rounds import RoundMeter, RoundReport
from tailrace.types import SampleId


@dataclass(frozen=True, slots=True)
class RequestBar:
    """A request in a slot of its engine."""

    engine: str
    lane: int
    prompt: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TrainerBar:
    """The trainer at work for one optimizer step: forward and backward, or the step itself."""

    step: int
    start_s: float
    end_s: float


class Timeline:
    """Sink: collects the bars of a run. Evaluations are left out."""

    def __init__(self) -> None:
        self.requests: list[RequestBar] = []
        self.trainer: list[TrainerBar] = []
        self.rounds: list[tuple[float, float]] = []
        """Start and end of each round."""
        self.steps: dict[int, int] = {}
        """The optimizer step that trained a prompt's group first, by prompt."""
        self._lanes: dict[str, Lanes] = {}
        self._running: dict[SampleId, tuple[RequestStarted, int]] = {}
        self._pending: list[Accumulated | Stepped] = []
        """What the trainer did since the last step."""
        self._round_start_s = 0.0
        self._meter = RoundMeter()

    @property
    def reports(self) -> list[RoundReport]:
        return self._meter.reports

    def on(self, event: Event) -> None:
        self._meter.on(event)
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
            case RoundStarted():
                self._round_start_s = event.time_s
            case RoundEnded():
                self.rounds.append((self._round_start_s, event.time_s))

    def close(self) -> None:
        """Requests that did not end are left out."""

    def _end_request(self, event: RequestEnded) -> None:
        started, lane = self._running.pop(event.sample)
        self._lanes[event.engine].give_back(lane)
        bar = RequestBar(event.engine, lane, event.sample.prompt, started.time_s, event.time_s)
        self.requests.append(bar)

    def _step(self, event: Stepped) -> None:
        step = event.stats.num_steps
        self._pending.append(event)
        self.trainer += [TrainerBar(step, work.start_s, work.end_s) for work in self._pending]
        self._pending.clear()
        for sample in event.stats.samples:
            self.steps.setdefault(sample.prompt, step)


def draw(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draw the runs under one another on one time axis, by name.

    Raises:
        ImportError: matplotlib is not installed (the extra `quickstart` brings it).
    """
    from tailrace.record.pictures import draw_timelines

    draw_timelines(timelines, path)
