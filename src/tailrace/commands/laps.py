"""A lap: one run of a schedule in a race, as the figures that races compare."""

from collections import Counter
from dataclasses import dataclass
from statistics import fmean

from tailrace.record.events import Event, RequestEnded, RoundEnded, RoundStarted, Stepped, TokensWasted
from tailrace.record.lags import mean_of
from tailrace.record.rounds import RoundMeter
from tailrace.record.rows import RoundRow


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
    """Lag in optimizer steps, mean over trained tokens. (Scripts read the lag under this name.)"""
    staleness_max: float
    """Largest lag of a trained token in optimizer steps."""
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
    staleness_publications: float = 0.0
    """Largest staleness of a trained token in publications."""
    length_mean: float = 0.0
    """Tokens of a trained sample."""
    length_max: float = 0.0
    truncated_share: float = 0.0
    """Share of the trained samples that have as many tokens as the length limit allows."""


class LapMeter:
    """Sink that measures a lap.

    Args:
        max_tokens: length limit of a completion.
        warm_up_rounds: first rounds of the lap that do not count.
    """

    def __init__(self, max_tokens: int, *, warm_up_rounds: int = 0) -> None:
        self._max_tokens, self._warm_up = max_tokens, warm_up_rounds
        self._rounds = RoundMeter()
        self._round = 0
        self._starts_s: dict[int, float] = {}
        self._ends_s: dict[int, float] = {}
        self._num_generated = self._num_wasted = 0
        # Of the trained samples of counted rounds:
        self._steps: Counter[int] = Counter()  # tokens by lag in optimizer steps
        self._publications: Counter[int] = Counter()  # tokens by staleness in publications
        self._lengths: Counter[int] = Counter()  # samples by length
        self._num_carried = self._deferrals_max = 0
        self._kl_sum = 0.0
        self._ess: list[float] = []

    def on(self, event: Event) -> None:
        self._rounds.on(event)
        match event:
            case RoundStarted():
                self._round = event.round
                self._starts_s[event.round] = event.time_s
            case RoundEnded():
                self._ends_s[event.round] = event.time_s
            case RequestEnded() if event.sample.prompt >= 0:
                self._num_generated += event.num_gained
            case TokensWasted():
                self._num_wasted += event.num_tokens
            case Stepped() if self._round >= self._warm_up:
                self._step(event)

    def close(self) -> None:
        """A round that did not end is not counted."""

    def _step(self, event: Stepped) -> None:
        self._steps += event.lags.steps
        self._publications += event.lags.publications
        self._num_carried += event.lags.carried
        self._lengths.update(sample.num_tokens for sample in event.samples)
        deferrals = (sample.group.deferrals for sample in event.samples)
        self._deferrals_max = max(self._deferrals_max, *deferrals)
        self._kl_sum += event.stats.kl * event.stats.num_tokens
        self._ess.append(event.stats.ess)

    @property
    def rounds(self) -> list[RoundRow]:
        """The counted rounds."""
        return [report for report in self._rounds.reports if report.round >= self._warm_up]

    def lap(self) -> Lap:
        """The figures of the lap. At least one counted round has trained."""
        rounds = self.rounds
        num_samples = sum(report.num_samples for report in rounds)
        num_tokens = sum(report.num_tokens for report in rounds)
        whole_s = self._ends_s[rounds[-1].round] - self._starts_s[rounds[0].round]
        stops = all(report.rollout_time_s for report in rounds)
        rollout_s = sum(report.rollout_time_s or 0.0 for report in rounds) if stops else whole_s
        truncated = sum(n for length, n in self._lengths.items() if length >= self._max_tokens)
        return Lap(
            main_time_s=fmean(report.main_time_s for report in rounds),
            waiting_ratio=fmean(report.waiting_ratio for report in rounds),
            first_dispatch_s=fmean(report.first_dispatch_s for report in rounds),
            trainer_compute_s=fmean(report.trainer_compute_s for report in rounds),
            rollout_time_s=fmean(report.rollout_time_s or 0.0 for report in rounds),
            reward=fmean(report.reward for report in rounds),
            samples_per_s=num_samples / whole_s,
            tokens_per_s=num_tokens / whole_s,
            rollout_tokens_per_s=num_tokens / rollout_s,
            staleness_mean=mean_of(self._steps),
            staleness_max=max(self._steps, default=0),
            carried_tokens=1.0 - self._publications[0] / self._publications.total(),
            carried_samples=self._num_carried / num_samples,
            waste_share=self._num_wasted / self._num_generated if self._num_generated else 0.0,
            deferrals_max=self._deferrals_max,
            mismatch_kl=self._kl_sum / num_tokens,
            ess_mean=fmean(self._ess),
            main_s_per_1000_samples=1000.0 * sum(report.main_time_s for report in rounds) / num_samples,
            staleness_publications=max(self._publications, default=0),
            length_mean=mean_of(self._lengths),
            length_max=max(self._lengths),
            truncated_share=truncated / num_samples,
        )
