"""The state of a run that a display shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from tailrace.record.events import Evaluated, Event, RequestEnded, RoundEnded, RoundStarted, time_of
from tailrace.record.rows import StepRow

NUM_REWARDS = 40
"""Steps whose rewards are drawn."""
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Progress:
    """Updated by events, read at any time."""

    rounds: int
    """Rounds of the run."""
    round: int = 0
    elapsed_s: float = 0.0
    accuracy: float | None = None
    generated_per_s: float = 0.0
    """Tokens a second in this round, counted when a request ends."""
    rewards: list[float] = field(default_factory=list)
    row: StepRow | None = None
    """The last step."""
    _generated: int = 0
    _now_s: float = 0.0
    _start_s: float | None = None
    _round_start_s: float = 0.0
    _first_round: tuple[int, float] | None = None
    """The first round of this life of the run, and its start."""
    _expected_end_s: float | None = None
    _step_s: float = 0.0
    _wait_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """Share of the round in which the trainer waited, up to the last step."""
        return self._wait_s / self._step_s if self._step_s else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Expected time to the end of the last round, by the mean duration of a round so far, evaluations and
        checkpoints included; None before the first round has ended."""
        return None if self._expected_end_s is None else max(0.0, self._expected_end_s - self._now_s)

    def on(self, event: Event) -> None:
        self._tick(time_of(event))
        match event:
            case RequestEnded() if event.sample.prompt >= 0:
                self._generated += event.num_gained
            case RoundStarted():
                self.round, self._round_start_s, self._generated = event.round, event.time_s, 0
                self._first_round = self._first_round or (event.round, event.time_s)
            case RoundEnded() if self._first_round:
                first, start_s = self._first_round
                round_s = (event.time_s - start_s) / (event.round + 1 - first)
                self._expected_end_s = event.time_s + round_s * max(0, self.rounds - event.round - 1)
            case StepRow():
                self._step(event)
            case Evaluated():
                self.accuracy = event.accuracy

    def _tick(self, time_s: float) -> None:
        if self._start_s is None:
            self._start_s = time_s
        self._now_s = max(self._now_s, time_s)
        self.elapsed_s = self._now_s - self._start_s
        if self._generated and time_s > self._round_start_s:
            self.generated_per_s = self._generated / (time_s - self._round_start_s)

    def _step(self, row: StepRow) -> None:
        if self.row is None or row.round != self.row.round:
            self._step_s = self._wait_s = 0.0
        self.row = row
        self._step_s += row.step_s
        self._wait_s += row.wait_s
        self.rewards = [*self.rewards, row.reward][-NUM_REWARDS:]


def step_line(progress: Progress, row: StepRow) -> str:
    """One line for a step, for a log."""
    parts = [
        f"Step {row.step}",
        f"Round {row.round + 1}/{progress.rounds}",
        f"{progress.elapsed_s:.1f}s",
        *([f"ETA {duration(remaining_s)}"] if (remaining_s := progress.remaining_s) is not None else []),
        f"Loss {number(row.loss)}",
        f"Reward {number(row.reward)}",
        f"KL {number(row.kl)}",
        f"Mismatch KL {number(row.mismatch_kl)}",
        f"Entropy {number(row.entropy)}",
        f"Length {lengths(row)}",
        f"{progress.generated_per_s:,.0f} tokens/s",
        f"Staleness {row.staleness_max}",
        f"Lag {row.lag_max}",
        f"Wait {row.wait_s:.2f}s of {row.step_s:.2f}s",
    ]
    return " | ".join(parts)


def lengths(row: StepRow) -> str:
    return f"{row.lengths.mean:.0f} (max {row.lengths.max}, {row.clipped_ratio:.0%} truncated)"


def number(value: float) -> str:
    """Four decimals, or three digits where a number is huge."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: '1:02:05'."""
    return str(timedelta(seconds=round(seconds)))


def sparkline(values: Sequence[float]) -> str:
    """Blocks between the lowest and the highest finite value: '▁▄█'."""
    halves = [value / 2 for value in values if math.isfinite(value)]  # the range of halves cannot overflow
    low, high = min(halves, default=0.0), max(halves, default=0.0)
    share = [(value - low) / (high - low) if high > low else 0.0 for value in halves]
    return "".join(BLOCKS[int(value * (len(BLOCKS) - 1))] for value in share)
