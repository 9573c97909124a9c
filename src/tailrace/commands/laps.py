"""A lap: one schedule in one repetition of a race, in the figures that races are about."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from tailrace.commands.probe import Probe
from tailrace.record.events import Event, RoundEnded, RoundStarted, Saved, Stepped
from tailrace.record.rounds import RoundReport
from tailrace.record.steps import Row, StepMeter
from tailrace.record.summary import Summary

SETTLED = 0.75
"""The share of a lap's prompts, in the order of drawing, whose fate is known at its end."""


@dataclass(frozen=True, slots=True)
class Lap:
    """Means over its counted rounds, where nothing else is said."""

    main_time_s: float
    waiting_ratio: float
    first_dispatch_s: float
    trainer_compute_s: float
    rollout_time_s: float
    reward: float
    samples_per_s: float
    """Trained, over the whole time of the rounds and of the checkpoints between them: a schedule that never
    stops generates while one is written."""
    tokens_per_s: float
    """Of these samples, over the same time: a lap that begins and ends with long responses in flight may
    train more or fewer tokens a sample than another."""
    rollout_tokens_per_s: float
    """Trained, over the time of the rollouts; over the whole time, where they never stop."""
    staleness_mean: float
    """Optimizer steps, over all trained tokens."""
    staleness_max: float
    carried_tokens: float
    """Share of trained tokens that are older than the published weights."""
    carried_samples: float
    waste_share: float
    """Tokens that train nobody, of all that were generated in the lap."""
    deferrals_max: float
    mismatch_kl: float
    ess_mean: float | None
    """Of the counted steps; None where the trainer does not say."""
    length_bias: float | None = None
    """Trained mean length over that of what was drawn, uninterrupted, minus 1; None: not probed."""
    time_to_reward_s: float | None = None
    """Time until held-out accuracy reaches the target; None: it does not, or was not probed."""


class LapMeter:
    """Sink: measures a lap. Its first `warm_up_rounds` are run and not counted."""

    def __init__(self, warm_up_rounds: int) -> None:
        self._warm_up = warm_up_rounds
        self.checkpoints: list[Saved] = []
        self._trained: defaultdict[int, list[int]] = defaultdict(list)
        """Of each prompt: tokens of its responses."""
        self._starts_s: dict[int, float] = {}
        self._ends_s: dict[int, float] = {}
        """Of each round."""
        self._rows: list[Row] = []
        self._steps = StepMeter(self._rows.append)

    def on(self, event: Event) -> None:
        self._steps.on(event)
        match event:
            case RoundStarted():
                self._starts_s[event.round] = event.time_s
            case RoundEnded():
                self._ends_s[event.round] = event.time_s
            case Saved():
                self.checkpoints.append(event)
            case Stepped():
                for sample in event.samples:
                    self._trained[sample.id.prompt].append(sample.num_tokens)

    def close(self) -> None:
        self._steps.close()

    @property
    def all_rounds(self) -> Sequence[RoundReport]:
        return self._steps.rounds

    @property
    def rounds(self) -> list[RoundReport]:
        """Those that count."""
        return [report for report in self.all_rounds if report.round >= self._warm_up]

    def lap(self, probes: Sequence[Probe], target: float) -> Lap:
        """
        Args:
            probes: of the lap's checkpoints, in order; may be none.
            target: the held-out accuracy that is timed.
        """
        rounds = self.rounds
        rows = [row for row in self._rows if "reward" in row and row["round"] >= self._warm_up]
        num_tokens = sum(row["num_tokens"] for row in rows)
        counted, whole = Summary(earlier=rows).summary(), Summary(earlier=self._rows).summary()
        whole_s = self._time_s(rounds[0].round, rounds[-1].round)
        stops = all(report.rollout_time_s for report in rounds)
        rollout_s = sum(report.rollout_time_s or 0.0 for report in rounds) if stops else whole_s
        return Lap(
            main_time_s=fmean(report.main_time_s for report in rounds),
            waiting_ratio=fmean(report.waiting_ratio for report in rounds),
            first_dispatch_s=fmean(report.first_dispatch_s for report in rounds),
            trainer_compute_s=fmean(report.trainer_compute_s for report in rounds),
            rollout_time_s=fmean(report.rollout_time_s or 0.0 for report in rounds),
            reward=fmean(report.reward for report in rounds),
            samples_per_s=sum(report.num_samples for report in rounds) / whole_s,
            tokens_per_s=num_tokens / whole_s,
            rollout_tokens_per_s=num_tokens / rollout_s,
            staleness_mean=counted.ages.staleness_mean,
            staleness_max=counted.ages.staleness_max,
            carried_tokens=counted.ages.carried_tokens,
            carried_samples=fmean(row["carried/samples"] for row in rows),
            waste_share=whole.tokens.waste_share,
            deferrals_max=counted.ages.deferrals_max,
            mismatch_kl=counted.mismatch_kl or 0.0,
            ess_mean=fmean(ess) if (ess := [row["ess"] for row in rows if "ess" in row]) else None,
            length_bias=self._length_bias(probes),
            time_to_reward_s=self._time_to(target, probes),
        )

    def _length_bias(self, probes: Sequence[Probe]) -> float | None:
        """Of the prompts drawn in counted rounds, less those of the end, which may still be under way. One
        that was drawn and never trained is in the probe alone: leaving it out is a bias, too."""
        probed = [probe for probe in probes if probe.round >= self._warm_up and probe.lengths]
        if not probed:
            return None
        settled = SETTLED * max(max(probe.lengths) for probe in probed)
        alone = {index: n for probe in probed for index, n in probe.lengths.items() if index <= settled}
        trained = [n for index in alone for n in self._trained.get(index, [])]
        if not trained:
            return None
        return fmean(trained) / fmean(chain.from_iterable(alone.values())) - 1.0

    def _time_to(self, target: float, probes: Sequence[Probe]) -> float | None:
        """Straight lines between the probes, each of which stands before its round."""
        before: tuple[float, float] | None = None
        for probe in probes:
            time_s = self._time_s(0, probe.round - 1)
            if probe.accuracy >= target:
                if before is None:
                    return time_s
                share = (target - before[1]) / (probe.accuracy - before[1])
                return before[0] + share * (time_s - before[0])
            before = time_s, probe.accuracy
        return None

    def _time_s(self, first: int, last: int) -> float:
        """From the start of a round to the end of one; 0 where that is the one before."""
        return self._ends_s[last] - self._starts_s[first] if last >= first else 0.0
