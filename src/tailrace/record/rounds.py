"""What a round cost, and how much of it the trainer waited: the measures of RolloutPipe 5.1.

A round's main time runs from its start to the end of its last optimizer step; publishing is not in it.
All of it that the trainer did not compute is wait, before the first dispatch and between dispatches
alike, so wait_s + trainer_compute_s = main_time_s.
"""

from dataclasses import dataclass, field
from statistics import fmean

from tailrace.record.events import (
    Accumulated,
    Event,
    GroupEnded,
    Published,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    Stepped,
)
from tailrace.record.lengths import LengthStats
from tailrace.types import SampleId


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round that trained. Lengths and rewards are of the trained samples."""

    round: int
    time_s: float
    """From its start to its end, publishing included."""
    main_time_s: float
    """From the round's start to the end of its last optimizer step."""
    rollout_time_s: float | None
    """From the round's start to the end of the last request that started in it; None where requests
    outlive their round, as they do in schedules that never stop."""
    first_dispatch_s: float
    """From the round's start to the start of the first accumulation."""
    trainer_compute_s: float
    wait_s: float
    """All of the main time in which the trainer did not compute."""
    publish_s: float
    num_steps: int
    num_groups: int
    num_samples: int
    num_tokens: int
    """Trained, like groups and samples."""
    num_generated: int
    """Tokens of the requests that left an engine in this round, counting what they gained there."""
    generated_tokens_per_s: float
    """Over the time of the rollout; over the whole round where that is unknown."""
    reward: float
    length: LengthStats
    first_step_length: float
    """Mean over the samples of the first step. Training in order of completion takes the short first."""
    last_step_length: float

    @property
    def waiting_ratio(self) -> float:
        """wait / (wait + compute): the headline of RolloutPipe 5.1."""
        return self.wait_s / self.main_time_s if self.main_time_s else 0.0

    @property
    def start_ratio(self) -> float:
        """(t_start - t_rollout_start) / (t_train_end - t_rollout_start): RolloutPipe eq. 4, which misses the
        waits in mid-round."""
        return self.first_dispatch_s / self.main_time_s if self.main_time_s else 0.0


@dataclass(slots=True)
class _OpenRound:
    start: RoundStarted
    running: set[SampleId] = field(default_factory=set)
    """Requests that started in it and have not ended."""
    rollout_end_s: float = 0.0
    first_dispatch_s: float | None = None
    train_end_s: float = 0.0
    compute_s: float = 0.0
    publish_s: float = 0.0
    num_groups: int = 0
    num_generated: int = 0
    rewards: list[float] = field(default_factory=list)
    lengths_by_step: list[list[int]] = field(default_factory=list)

    def dispatch(self, time_s: float) -> None:
        if self.first_dispatch_s is None:
            self.first_dispatch_s = max(time_s, self.start.time_s)

    def measure(self, event: Event) -> None:
        match event:
            case RequestStarted():
                self.running.add(event.sample)
            case RequestEnded():
                if event.sample.prompt >= 0:
                    self.num_generated += event.num_gained
                if event.sample in self.running:
                    self.running.remove(event.sample)
                    self.rollout_end_s = event.time_s
            case Accumulated():
                self.dispatch(event.start_s)
            case Stepped():
                self.step(event)
            case Published():
                self.publish_s += event.end_s - event.start_s
            case GroupEnded(fate="trained"):
                self.num_groups += 1

    def step(self, event: Stepped) -> None:
        self.dispatch(event.start_s)
        self.train_end_s = event.end_s
        self.compute_s += event.stats.compute_s
        self.rewards += [sample.reward for sample in event.samples if sample.reward is not None]
        self.lengths_by_step.append([sample.num_tokens for sample in event.samples])

    def report(self, end_s: float) -> RoundReport:
        assert self.first_dispatch_s is not None
        start_s = self.start.time_s
        main_time_s = self.train_end_s - start_s
        stopped = not self.running and self.rollout_end_s > start_s
        rollout_time_s = self.rollout_end_s - start_s if stopped else None
        generating_s = rollout_time_s or end_s - start_s
        lengths = [length for step in self.lengths_by_step for length in step]
        return RoundReport(
            round=self.start.round,
            time_s=end_s - start_s,
            main_time_s=main_time_s,
            rollout_time_s=rollout_time_s,
            first_dispatch_s=self.first_dispatch_s - start_s,
            trainer_compute_s=self.compute_s,
            wait_s=max(0.0, main_time_s - self.compute_s),
            publish_s=self.publish_s,
            num_steps=len(self.lengths_by_step),
            num_groups=self.num_groups,
            num_samples=len(lengths),
            num_tokens=sum(lengths),
            num_generated=self.num_generated,
            generated_tokens_per_s=self.num_generated / generating_s if generating_s else 0.0,
            reward=fmean(self.rewards),
            length=LengthStats.of(lengths),
            first_step_length=fmean(self.lengths_by_step[0]),
            last_step_length=fmean(self.lengths_by_step[-1]),
        )


class RoundMeter:
    """Sink: `reports` grows by one with each round that ends and trained something."""

    def __init__(self) -> None:
        self.reports: list[RoundReport] = []
        self._open: _OpenRound | None = None

    def on(self, event: Event) -> None:
        match event:
            case RoundStarted():
                self._open = _OpenRound(event)
            case RoundEnded():
                if self._open and self._open.lengths_by_step:
                    self.reports.append(self._open.report(event.time_s))
                self._open = None
            case _ if self._open:
                self._open.measure(event)

    def close(self) -> None:
        """A round that did not end is not reported."""
