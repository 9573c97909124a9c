"""One row of numbers an optimizer step, under the names that RL post-training reports them by.

    step, round, time                 optimizer steps and rounds so far (from 1 and from 0); seconds on the
                                      run's clock
    reward, reward_std                mean over samples; mean over groups of the group's deviation
    frac_reward_zero_std              share of groups whose rewards are all equal: no gradient
    completions/length/*              mean, p50, p90, p99, max, in tokens
    completions/clipped_ratio         share of samples that ended at the length limit
    completions/failed/REASON         samples that could not be rewarded
    loss, grad_norm, learning_rate, entropy, clip_ratio, mismatch_kl, ess, reference_kl, value_loss, skipped,
    num_tokens                        of the step (StepStats); mismatch_kl: behaviour to current policy
    ess/guard                         the least that a guard found before the step, of what it then gave up or
                                      trained; `ess` is of what was trained
    staleness/mean, staleness/max     optimizer steps between the weights that produced a trained token and
                                      those that were trained, over tokens
    staleness/tenth_0 ... tenth_9     the same mean along the response: its first tenth, ..., its last
    staleness/publications            the largest in publications: what schedules promise
    carried/tokens, carried/samples   share of tokens older than the published weights; of samples with any
    versions/mean, versions/max       versions that produced a sample, over samples
    deferrals/mean, deferrals/max     how often a group was parked or put off, over groups
    age/mean, age/max                 rounds since a group was drawn, over groups
    time/step                         since the last step's end, or the round's start: neither publishing
                                      nor evaluation is in it; = time/train + time/wait
    perf/tokens_per_s                 trained tokens over time/step
    tokens/generated                  by requests that left an engine
    tail/wasted_tokens/REASON         tokens that train nobody
    groups/parked, tokens/parked      in the last row: what was neither trained nor thrown away
    groups/trained, groups/filtered/REASON, groups/dropped/REASON, rows/skipped/REASON
    round/*                           in a round's last row: its RoundReport
    eval/accuracy, eval/mean_tokens, eval/num_samples
                                      in a row of their own; `round` is the one about to start

What happened between two steps is counted in the row of the second, or of the round's last step.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean

from tailrace.record.events import (
    BooksClosed,
    EssTaken,
    Evaluated,
    Event,
    GroupEnded,
    RequestEnded,
    RoundEnded,
    RoundStarted,
    RowSkipped,
    SampleScored,
    Stepped,
    TokensWasted,
)
from tailrace.record.lags import mean_of
from tailrace.record.lengths import LengthStats
from tailrace.record.rounds import RoundMeter, RoundReport
from tailrace.types import Group, Sample

Row = dict[str, float]


class StepMeter:
    """Sink: turns events into rows and passes each on once it is complete.

    `row` is the latest step's: it stands from the step on, and still grows until its round ends.
    """

    def __init__(self, write: Callable[[Row], None], *, step: int = 0) -> None:
        """step: optimizer steps before the first event, in a resumed run."""
        self.row: Row = {}
        self._write = write
        self._step = step
        self._round = 0
        self._pending = False
        self._last_end_s = 0.0
        self._guarded: list[float] = []
        self._counts: Counter[str] = Counter()
        self._rounds = RoundMeter()

    @property
    def rounds(self) -> list[RoundReport]:
        """Of those that ended."""
        return self._rounds.reports

    def on(self, event: Event) -> None:
        self._rounds.on(event)
        match event:
            case RoundStarted():
                self._round, self._last_end_s = event.round, event.time_s
            case BooksClosed():
                self._counts["groups/parked"] = event.num_parked_groups
                self._counts["tokens/parked"] = event.num_parked_tokens
            case EssTaken():
                self._guarded.append(event.ess)
            case Stepped():
                self._finish_row()
                self._begin_row(event)
            case RoundEnded():
                self._end_round(event)
            case Evaluated():
                self._write(self._evaluation(event))
            case _:
                self._count(event)

    def close(self) -> None:
        """What came after the last row gets one of its own, without a step's numbers."""
        self._finish_row()
        if self._counts:
            self.row = {"step": self._step, "round": self._round, "time": self._last_end_s}
            self._take_counts()
            self._write(self.row)

    def _count(self, event: Event) -> None:
        match event:
            case RequestEnded() if event.sample.prompt >= 0 and event.num_gained:
                self._counts["tokens/generated"] += event.num_gained
            case SampleScored(failure=str(reason)):
                self._counts[f"completions/failed/{_slug(reason)}"] += 1
            case TokensWasted():
                self._counts[f"tail/wasted_tokens/{_slug(event.reason)}"] += event.num_tokens
            case GroupEnded(fate="trained"):
                self._counts["groups/trained"] += 1
            case GroupEnded():
                self._counts[f"groups/{event.fate}/{_slug(event.reason)}"] += 1
            case RowSkipped():
                self._counts[f"rows/skipped/{_slug(event.reason)}"] += 1

    def _begin_row(self, event: Stepped) -> None:
        self._step = event.stats.num_steps
        step_s = event.end_s - self._last_end_s
        self.row = (
            {"step": self._step, "round": self._round, "time": event.end_s}
            | _completions(event.samples)
            | _training(event)
            | _ages(event, self._round)
            | {
                "time/step": step_s,
                "time/wait": max(0.0, step_s - event.stats.compute_s),
                "time/train": event.stats.compute_s,
                "perf/tokens_per_s": event.stats.num_tokens / step_s if step_s else 0.0,
            }
        )
        if self._guarded:
            self.row["ess/guard"] = min(self._guarded)
            self._guarded.clear()
        self._last_end_s = event.end_s
        self._take_counts()
        self._pending = True

    def _end_round(self, event: RoundEnded) -> None:
        if self._pending:
            self.row |= _round_row(self.rounds[-1])
            self._take_counts()
        self._finish_row()
        self._last_end_s = event.time_s

    def _finish_row(self) -> None:
        if self._pending:
            self._write(self.row)
        self._pending = False

    def _take_counts(self) -> None:
        for key, count in self._counts.items():
            self.row[key] = self.row.get(key, 0) + count
        self._counts.clear()

    def _evaluation(self, event: Evaluated) -> Row:
        return {
            "step": self._step,
            "round": event.round,
            "time": event.time_s,
            "eval/accuracy": event.accuracy,
            "eval/mean_tokens": event.mean_tokens,
            "eval/num_samples": event.num_samples,
        }


def _slug(reason: str) -> str:
    return reason.replace(" ", "_")


def _completions(samples: tuple[Sample, ...]) -> Row:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    stds = [_reward_std(group) for group in dict.fromkeys(sample.group for sample in samples)]
    length = LengthStats.of([sample.num_tokens for sample in samples])
    row: Row = {
        "reward": fmean(rewards),
        "reward_std": fmean(stds),
        "frac_reward_zero_std": stds.count(0.0) / len(stds),
    }
    row |= {f"completions/length/{name}": value for name, value in asdict(length).items()}
    clipped = sum(sample.finish_reason == "length" for sample in samples)
    return row | {"completions/clipped_ratio": clipped / len(samples)}


def _reward_std(group: Group) -> float:
    """Over n - 1, as TRL reports it."""
    rewards = [sample.reward for sample in group.trainable if sample.reward is not None]
    if len(set(rewards)) == 1:
        return 0.0
    mean = fmean(rewards)
    return math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def _training(event: Stepped) -> Row:
    stats = event.stats
    return {
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "learning_rate": stats.learning_rate,
        "entropy": stats.entropy,
        "clip_ratio": stats.clip_ratio,
        "mismatch_kl": stats.kl,
        "ess": stats.ess,
        "reference_kl": stats.reference_kl,
        "value_loss": stats.value_loss,
        "skipped": float(stats.skipped),
        "num_tokens": stats.num_tokens,
    }


def _ages(event: Stepped, round: int) -> Row:
    """Old tokens, old groups."""
    lags = event.lags
    num_tokens = lags.publications.total()
    groups = dict.fromkeys(sample.group for sample in event.samples)
    versions = Counter(len({span.version for span in sample.spans}) for sample in event.samples)
    deferrals = Counter(group.deferrals for group in groups)
    ages = Counter(round - group.round_drawn for group in groups)
    row: Row = {
        "staleness/mean": mean_of(lags.steps),
        "staleness/max": max(lags.steps, default=0),
        "staleness/publications": max(lags.publications, default=0),
        "carried/tokens": 1.0 - lags.publications[0] / num_tokens if num_tokens else 0.0,
        "carried/samples": lags.carried / len(event.samples),
    }
    for name, counts in (("versions", versions), ("deferrals", deferrals), ("age", ages)):
        row |= {f"{name}/mean": mean_of(counts), f"{name}/max": max(counts)}
    return row | {f"staleness/tenth_{tenth}": lag for tenth, lag in enumerate(lags.profile)}


def _round_row(report: RoundReport) -> Row:
    figures = asdict(report) | {"waiting_ratio": report.waiting_ratio, "start_ratio": report.start_ratio}
    lengths = figures.pop("length")
    figures |= {f"length/{name}": value for name, value in lengths.items()}
    return {
        f"round/{name}": value for name, value in figures.items() if name != "round" and value is not None
    }
