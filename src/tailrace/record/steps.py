"""Turns the events of a run into rows: one an optimizer step, one a round, one an evaluation. `rows.py` says
what each figure is."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from statistics import fmean

from msgspec.structs import replace

from tailrace.record.bounds import BoundMeter
from tailrace.record.episodes import episode_figures
from tailrace.record.events import (
    Accumulated,
    BooksClosed,
    ControllerLag,
    EngineStateChanged,
    EssTaken,
    Evaluated,
    Event,
    GroupEnded,
    Preempted,
    Published,
    Recorder,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    RowSkipped,
    SampleScored,
    Sink,
    Stepped,
    TokensWasted,
)
from tailrace.record.lags import mean_of
from tailrace.record.moments import LengthStats, mean, standard_deviation
from tailrace.record.rows import ClosingRow, Counts, EvaluationRow, RoundRow, Row, StepRow
from tailrace.types import Sample, SampleId


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
        self._bounds = BoundMeter()

    def on(self, event: Event) -> None:
        self._bounds.on(event)
        match event:
            case RoundStarted():
                self._open = _OpenRound(event)
            case RoundEnded():
                if self._open and self._open.lengths_by_step:
                    row = self._open.report(event.time_s)
                    bound_s, bound = self._bounds.end_round(row.main_time_s, row.trainer_compute_s)
                    self.reports.append(replace(row, bound_s=bound_s, bound=bound))
                self._open = None
            case _ if self._open:
                self._open.measure(event)

    def close(self) -> None:
        """A round that has not ended is not reported."""


class StepMeter:
    """Sink: passes every event to its sinks, followed by the rows that the event completes.

    A `StepRow` follows its `Stepped`, a `RoundRow` its `RoundEnded` (if the round trained), an
    `EvaluationRow` its `Evaluated`. What is counted between two steps is in the row of the second, or in
    the round's row if the round ends before that. A `ClosingRow` at the end holds what was counted after
    the last row.
    """

    def __init__(self, *sinks: Sink, wall_clock: Callable[[], float], earlier: Sequence[Row] = ()) -> None:
        """
        Args:
            sinks: the sinks, in the order in which they receive events.
            wall_clock: Unix seconds now; virtual seconds in virtual time.
            earlier: in a resumed run, the rows before the resume (`metrics.read_rows`).
        """
        self._sinks = Recorder(*sinks)
        self._wall_clock = wall_clock
        last = next((row for row in reversed(earlier) if isinstance(row, StepRow)), None)
        self._step, self._num_tokens = (last.step, last.num_tokens) if last else (0, 0)
        self._round = 0
        self._last_end_s = 0.0
        self._guards: list[float] = []
        self._controller_lags: list[float] = []
        self._counts = Counts()
        self._rounds = RoundMeter()

    def on(self, event: Event) -> None:
        self._sinks.emit(event)
        self._rounds.on(event)
        for row in self._measure(event):
            self._sinks.emit(row)

    def close(self) -> None:
        if self._counts != Counts():
            row = ClosingRow(
                step=self._step,
                round=self._round,
                time_s=self._last_end_s,
                wall_time=self._wall_clock(),
                counts=self._take_counts(),
            )
            self._sinks.emit(row)
        self._sinks.close()

    def _measure(self, event: Event) -> Iterator[Row]:
        match event:
            case RoundStarted():
                self._round, self._last_end_s = event.round, event.time_s
            case Stepped():
                yield self._step_row(event)
            case RoundEnded():
                self._last_end_s = event.time_s
                if self._rounds.reports:  # none if the round did not train
                    yield replace(self._rounds.reports.pop(), counts=self._take_counts())
            case Evaluated():
                yield EvaluationRow(
                    step=self._step,
                    round=event.round,
                    time_s=event.time_s,
                    wall_time=self._wall_clock(),
                    accuracy=event.accuracy,
                    mean_tokens=event.mean_tokens,
                    num_samples=event.num_samples,
                    sets=event.sets,
                )
            case EssTaken():
                self._guards.append(event.ess)
            case ControllerLag():
                self._controller_lags.append(event.lag_s)
            case BooksClosed():
                self._counts.groups_parked = event.num_parked_groups
                self._counts.tokens_parked = event.num_parked_tokens
            case _:
                _count(self._counts, event)

    def _step_row(self, event: Stepped) -> StepRow:
        stats, samples, lags = event.stats, event.samples, event.lags
        step_s = event.end_s - self._last_end_s
        self._step, self._last_end_s = stats.num_steps, event.end_s
        self._num_tokens += sum(sample.num_sequence_tokens for sample in samples)
        groups = list(dict.fromkeys(sample.group for sample in samples))
        stds = [standard_deviation(_known_rewards(group.trainable)) for group in groups]
        counted_tokens = lags.publications.total()
        versions = [len({span.version for span in sample.spans}) for sample in samples]
        deferrals = [group.deferrals for group in groups]
        ages = [self._round - group.round_drawn for group in groups]
        row = StepRow(
            step=self._step,
            round=self._round,
            time_s=event.end_s,
            wall_time=self._wall_clock(),
            num_tokens=self._num_tokens,
            trained_tokens=stats.num_tokens,
            trained_samples=len(samples),
            reward=mean(_known_rewards(samples)),
            rewards=_means(sample.reward_metrics.items() for sample in samples),
            reward_by_source=_means(_reward_by_source(samples)),
            reward_std=mean(stds),
            frac_reward_zero_std=stds.count(0.0) / len(stds),
            lengths=LengthStats.of([sample.num_tokens for sample in samples]),
            clipped_ratio=fmean(sample.finish_reason == "length" for sample in samples),
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            learning_rate=stats.learning_rate,
            entropy=stats.entropy,
            clip_ratio=stats.clip_ratio,
            kl=stats.reference_kl,
            mismatch_kl=stats.kl,
            engine_mismatch_kl=stats.engine_mismatch_kl,
            ess=stats.ess,
            ess_guard=min(self._guards, default=None),
            value_loss=stats.value_loss,
            skipped=int(stats.skipped),
            staleness_mean=mean_of(lags.publications),
            staleness_max=max(lags.publications, default=0),
            lag_mean=mean_of(lags.steps),
            lag_max=max(lags.steps, default=0),
            lag_by_tenth=dict(enumerate(lags.profile)),
            carried_tokens=1.0 - lags.publications[0] / counted_tokens if counted_tokens else 0.0,
            carried_samples=lags.carried / len(samples),
            versions_mean=fmean(versions),
            versions_max=max(versions),
            deferrals_mean=fmean(deferrals),
            deferrals_max=max(deferrals),
            age_mean=fmean(ages),
            age_max=max(ages),
            step_s=step_s,
            wait_s=max(0.0, step_s - stats.compute_s),
            train_s=stats.compute_s,
            controller_lag_s=max(self._controller_lags, default=None),
            tokens_per_s=stats.num_tokens / step_s if step_s else 0.0,
            counts=self._take_counts(),
            **episode_figures(samples),
        )
        self._guards.clear()
        self._controller_lags.clear()
        return row

    def _take_counts(self) -> Counts:
        counts, self._counts = self._counts, Counts()
        return counts


def _count(counts: Counts, event: Event) -> None:
    match event:
        case RequestEnded() if event.sample.prompt >= 0:
            counts.generated += event.num_gained
        case SampleScored(failure=str(reason)):
            counts.failed[_slug(reason)] += 1
        case TokensWasted():
            counts.wasted[_slug(event.reason)] += event.num_tokens
        case GroupEnded(fate="trained"):
            counts.groups_trained += 1
        case GroupEnded(fate="filtered"):
            counts.groups_filtered[_slug(event.reason)] += 1
        case GroupEnded():
            counts.groups_dropped[_slug(event.reason)] += 1
        case EngineStateChanged(state="dead"):
            counts.engines_died[event.engine] += 1
        case Preempted():
            counts.preempted[event.engine] += event.num_requests
        case RowSkipped():
            counts.rows_skipped[_slug(event.reason)] += 1


def _slug(reason: str) -> str:
    return reason.replace(" ", "_")


def _means(items: Iterable[Iterable[tuple[str, float]]]) -> dict[str, float]:
    """The mean of the values of each name, in the order of the names."""
    values: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(items):
        values.setdefault(name, []).append(value)
    return {name: fmean(values[name]) for name in sorted(values)}


def _reward_by_source(samples: Iterable[Sample]) -> Iterator[list[tuple[str, float]]]:
    for sample in samples:
        if sample.prompt.source and sample.reward is not None:
            yield [(sample.prompt.source, sample.reward)]


def _known_rewards(samples: Iterable[Sample]) -> list[float]:
    return [sample.reward for sample in samples if sample.reward is not None]
