"""Measures rounds: `rows.RoundRow` says what each figure is."""

from dataclasses import dataclass, field
from math import inf
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
from tailrace.record.moments import LengthStats, mean
from tailrace.record.rows import RoundRow
from tailrace.types import SampleId


@dataclass(slots=True)
class _OpenRound:
    start: RoundStarted
    running: set[SampleId] = field(default_factory=set)
    """Requests that started in this round and have not ended."""
    rollout_end_s: float = 0.0
    first_dispatch_s: float = inf
    train_end_s: float = 0.0
    compute_s: float = 0.0
    publish_s: float = 0.0
    changed_weights: list[float] = field(default_factory=list)
    num_groups: int = 0
    num_generated: int = 0
    rewards: list[float] = field(default_factory=list)
    lengths_by_step: list[list[int]] = field(default_factory=list)

    def measure(self, event: Event) -> None:
        if isinstance(event, Accumulated | Stepped):
            self.first_dispatch_s = min(self.first_dispatch_s, max(event.start_s, self.start.time_s))
        match event:
            case RequestStarted():
                self.running.add(event.sample)
            case RequestEnded():
                if event.sample.prompt >= 0:
                    self.num_generated += event.num_gained
                if event.sample in self.running:
                    self.running.remove(event.sample)
                    self.rollout_end_s = event.time_s
            case Stepped():
                self.train_end_s = event.end_s
                self.compute_s += event.stats.compute_s
                self.rewards += [sample.reward for sample in event.samples if sample.reward is not None]
                self.lengths_by_step.append([sample.num_tokens for sample in event.samples])
            case Published():
                self.publish_s += event.end_s - event.start_s
                if event.changed_weights is not None:
                    self.changed_weights.append(event.changed_weights)
            case GroupEnded(fate="trained"):
                self.num_groups += 1

    def report(self, end_s: float) -> RoundRow:
        start_s = self.start.time_s
        first_dispatch_s = self.first_dispatch_s - start_s
        main_time_s = self.train_end_s - start_s
        wait_s = max(0.0, main_time_s - self.compute_s)
        stopped = not self.running and self.rollout_end_s > start_s
        rollout_time_s = self.rollout_end_s - start_s if stopped else None
        generating_s = rollout_time_s or end_s - start_s
        lengths = [length for step in self.lengths_by_step for length in step]
        return RoundRow(
            round=self.start.round,
            end_s=end_s,
            duration_s=end_s - start_s,
            main_time_s=main_time_s,
            rollout_time_s=rollout_time_s,
            first_dispatch_s=first_dispatch_s,
            trainer_compute_s=self.compute_s,
            wait_s=wait_s,
            waiting_ratio=wait_s / main_time_s if main_time_s else 0.0,
            start_ratio=first_dispatch_s / main_time_s if main_time_s else 0.0,
            publish_s=self.publish_s,
            changed_weights=fmean(self.changed_weights) if self.changed_weights else None,
            num_steps=len(self.lengths_by_step),
            num_groups=self.num_groups,
            num_samples=len(lengths),
            num_tokens=sum(lengths),
            num_generated=self.num_generated,
            generated_tokens_per_s=self.num_generated / generating_s if generating_s else 0.0,
            reward=mean(self.rewards),
            lengths=LengthStats.of(lengths),
            first_step_length=fmean(self.lengths_by_step[0]),
            last_step_length=fmean(self.lengths_by_step[-1]),
        )


class RoundMeter:
    """Sink: `reports` grows by one row with each round that ends and has trained something."""

    def __init__(self) -> None:
        self.reports: list[RoundRow] = []
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
        """A round that has not ended is not reported."""
