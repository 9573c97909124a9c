"""A lap: one run of a schedule in a race, as the figures that races compare."""

from dataclasses import dataclass
from statistics import fmean

from tailrace.record.events import Event, RoundStarted, Stepped
from tailrace.record.rows import ClosingRow, Counts, RoundRow, StepRow


@dataclass(frozen=True, slots=True)
class Lap:
    """Figures of one lap. They are means over its counted rounds, unless the field says otherwise."""

    main_time_s: float
    """From the start of a round to the end of its last optimizer step."""
    waiting_ratio: float
    first_dispatch_s: float
    trainer_compute_s: float
    rollout_time_s: float
    reward: float
    samples_per_s: float
    """Trained samples over the whole time of the rounds and of the checkpoints between them. The time between
    rounds counts because schedules that never stop generate in it."""
    tokens_per_s: float
    """Trained tokens over the same time."""
    rollout_tokens_per_s: float
    """Trained tokens over the time of the rollouts; over the whole time if the rollout never stops."""
    staleness_mean: float
    """Publications between a token's generation and its training, mean over trained tokens."""
    staleness_max: float
    """The largest of a trained token."""
    lag_mean: float
    """Optimizer steps between a token's generation and its training, mean over trained tokens."""
    lag_max: float
    """The largest of a trained token."""
    carried_tokens: float
    """Share of the trained tokens that are older than the published weights."""
    carried_samples: float
    """Share of the trained samples with such a token."""
    waste_share: float
    """Tokens that were not trained, as a share of all tokens generated in the lap."""
    deferrals_max: float
    """Largest number of times that a trained group was parked or deferred."""
    mismatch_kl: float
    """KL of the behavior policy to the current policy in nats a token, mean over trained tokens."""
    ess_mean: float
    """Effective sample size, mean over optimizer steps."""
    length_bias: float | None = None
    """Mean trained length over the mean length without interruptions, minus 1. None: not measured. Only
    benchmarks/race measures it."""
    time_to_reward_s: float | None = None
    """Seconds until the held-out accuracy reaches a target. None: not measured, or not reached. Only
    benchmarks/race measures it."""
    main_s_per_1000_samples: float = 0.0
    """Main time of all counted rounds over their thousands of trained samples."""
    length_mean: float = 0.0
    """Tokens of a trained sample."""
    length_max: float = 0.0
    bound_s: float = 0.0
    """The lower bound on the main time (`bounds.py`)."""
    truncated_share: float = 0.0
    """Share of the trained samples that have as many tokens as the length limit allows."""


FIGURES = (
    ("staleness, max (publications)", "staleness_max", "{:.0f}"),
    ("lag, mean (optimizer steps)", "lag_mean", "{:.2f}"),
    ("lag, max (optimizer steps)", "lag_max", "{:.0f}"),
    ("effective sample size", "ess_mean", "{:.3f}"),
    ("carried tokens", "carried_tokens", "{:.1%}"),
    ("carried samples", "carried_samples", "{:.1%}"),
    ("length, mean (tokens)", "length_mean", "{:,.0f}"),
    ("length, max (tokens)", "length_max", "{:,.0f}"),
    ("truncated samples", "truncated_share", "{:.1%}"),
    ("wasted tokens", "waste_share", "{:.1%}"),
)
"""What every table of laps shows beside its times: the label, the field of `Lap` and its format."""


class LapMeter:
    """Sink of a `StepMeter` that measures a lap.

    Args:
        warm_up_rounds: first rounds of the lap that do not count.
    """

    def __init__(self, *, warm_up_rounds: int = 0) -> None:
        self._warm_up = warm_up_rounds
        self.rounds: list[RoundRow] = []
        """The counted rounds that have trained."""
        self._round = 0
        self._counts = Counts()
        # Of the optimizer steps of counted rounds:
        self._steps: list[StepRow] = []
        self._num_samples: list[int] = []
        self._num_truncated = 0

    def on(self, event: Event) -> None:
        if isinstance(event, StepRow | RoundRow | ClosingRow):
            self._counts = self._counts.plus(event.counts)
        match event:
            case RoundStarted():
                self._round = event.round
            case Stepped() if self._round >= self._warm_up:
                self._num_samples.append(len(event.samples))
                self._num_truncated += sum(sample.finish_reason == "length" for sample in event.samples)
            case StepRow() if self._round >= self._warm_up:
                self._steps.append(event)
            case RoundRow() if self._round >= self._warm_up:
                self.rounds.append(event)

    def close(self) -> None:
        """A round that did not end is not counted."""

    def lap(self) -> Lap:
        """The figures of the lap. At least one counted round has trained."""
        rounds, steps, counts = self.rounds, self._steps, self._counts
        weights = [row.trained_tokens for row in steps]
        num_samples = sum(row.num_samples for row in rounds)
        num_tokens = sum(row.num_tokens for row in rounds)
        whole_s = rounds[-1].end_s - rounds[0].end_s + rounds[0].duration_s
        stops = all(row.rollout_time_s for row in rounds)
        rollout_s = sum(row.rollout_time_s or 0.0 for row in rounds) if stops else whole_s
        return Lap(
            main_time_s=fmean(row.main_time_s for row in rounds),
            waiting_ratio=fmean(row.waiting_ratio for row in rounds),
            first_dispatch_s=fmean(row.first_dispatch_s for row in rounds),
            trainer_compute_s=fmean(row.trainer_compute_s for row in rounds),
            rollout_time_s=fmean(row.rollout_time_s or 0.0 for row in rounds),
            reward=fmean(row.reward for row in rounds),
            samples_per_s=num_samples / whole_s,
            tokens_per_s=num_tokens / whole_s,
            rollout_tokens_per_s=num_tokens / rollout_s,
            staleness_mean=fmean((row.staleness_mean for row in steps), weights),
            staleness_max=max(row.staleness_max for row in steps),
            lag_mean=fmean((row.lag_mean for row in steps), weights),
            lag_max=max(row.lag_max for row in steps),
            carried_tokens=fmean((row.carried_tokens for row in steps), weights),
            carried_samples=fmean((row.carried_samples for row in steps), self._num_samples),
            waste_share=sum(counts.wasted.values()) / counts.generated if counts.generated else 0.0,
            deferrals_max=max(row.deferrals_max for row in steps),
            mismatch_kl=fmean((row.mismatch_kl for row in steps), weights),
            ess_mean=fmean(row.ess for row in steps),
            main_s_per_1000_samples=1000.0 * sum(row.main_time_s for row in rounds) / num_samples,
            length_mean=num_tokens / num_samples,
            length_max=max(row.lengths.max for row in rounds),
            bound_s=fmean(row.bound_s or 0.0 for row in rounds),
            truncated_share=self._num_truncated / num_samples,
        )
