"""Turns the events of a run into rows: one an optimizer step, one a round, one an evaluation. The table in
`figures.py` says what each figure is."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from statistics import fmean

from tailrace.contracts.engine import Arrival
from tailrace.record import events
from tailrace.record.bias import BiasMeter
from tailrace.record.bounds import BoundMeter
from tailrace.record.events import Event, Recorder, Row, Sink
from tailrace.record.figures import (
    episode_figures,
    in_family,
    length_figures,
    mean,
    mean_and_max,
    ordered,
    standard_deviation,
    steps_of,
)
from tailrace.types import Sample, SampleId

MEMORY = {
    f"perf/max_memory_{kind}_gb": f"perf/engine_max_memory_{kind}_gb" for kind in ("allocated", "reserved")
}
"""Figures of a device (`devices.used_on`), and their names in the rows where it is an engine's."""
COSTS_OF_ROWS = ("cost/step", "round/cost")


@dataclass(slots=True)
class _OpenRound:
    start: events.RoundStarted
    running: set[SampleId] = field(default_factory=set)
    """Requests that started in this round and have not ended."""
    rollout_end_s: float = 0.0
    first_dispatch_s: float = inf
    train_end_s: float = 0.0
    compute_s: float = 0.0
    publications: list[events.Published] = field(default_factory=list)
    num_groups: int = 0
    num_generated: int = 0
    rewards: list[float] = field(default_factory=list)
    lengths_by_step: list[list[int]] = field(default_factory=list)

    def measure(self, event: Event) -> None:
        if isinstance(event, events.Accumulated | events.Stepped):
            self.first_dispatch_s = min(self.first_dispatch_s, max(event.start_s, self.start.time_s))
        match event:
            case events.RequestStarted():
                self.running.add(event.sample)
            case events.RequestEnded():
                if event.sample.prompt >= 0:
                    self.num_generated += event.num_gained
                if event.sample in self.running:
                    self.running.remove(event.sample)
                    self.rollout_end_s = event.time_s
            case events.Stepped():
                self.train_end_s = event.end_s
                self.compute_s += event.stats.compute_s
                self.rewards += [sample.reward for sample in event.samples if sample.reward is not None]
                self.lengths_by_step.append([sample.num_tokens for sample in event.samples])
            case events.Published():
                self.publications.append(event)
            case events.GroupEnded(fate="trained"):
                self.num_groups += 1

    def figures(self, end_s: float) -> Row:
        start_s = self.start.time_s
        first_dispatch_s = self.first_dispatch_s - start_s
        main_time_s = self.train_end_s - start_s
        wait_s = max(0.0, main_time_s - self.compute_s)
        stopped = not self.running and self.rollout_end_s > start_s
        rollout_time_s = self.rollout_end_s - start_s if stopped else 0.0
        generating_s = rollout_time_s or end_s - start_s
        lengths = [length for step in self.lengths_by_step for length in step]
        row: Row = {
            "round": self.start.round,
            "round/end_s": end_s,
            "round/time_s": end_s - start_s,
            "round/main_time_s": main_time_s,
            "round/first_dispatch_s": first_dispatch_s,
            "round/trainer_compute_s": self.compute_s,
            "round/wait_s": wait_s,
            "round/waiting_ratio": wait_s / main_time_s if main_time_s else 0.0,
            "round/start_ratio": first_dispatch_s / main_time_s if main_time_s else 0.0,
            "round/publish_s": sum((each.duration_s for each in self.publications), 0.0),
            "round/num_steps": len(self.lengths_by_step),
            "round/num_groups": self.num_groups,
            "round/num_samples": len(lengths),
            "round/num_tokens": sum(lengths),
            "round/num_generated": self.num_generated,
            "round/generated_tokens_per_s": self.num_generated / generating_s if generating_s else 0.0,
            "round/reward": mean(self.rewards),
            "round/first_step_length": fmean(self.lengths_by_step[0]),
            "round/last_step_length": fmean(self.lengths_by_step[-1]),
            **length_figures("round/completions/", lengths),
        }
        if stopped:
            row["round/rollout_time_s"] = rollout_time_s
        changed = [share for each in self.publications if (share := each.changed_weights) is not None]
        if changed:
            row["round/changed_weights"] = fmean(changed)
        return row


class StepMeter:
    """Sink: passes every event to its sinks, followed by the rows that the event completes.

    A step's row follows its `Stepped`; a `RoundBound` and the round's row follow its `RoundEnded` (if the
    round trained); an evaluation's row follows its `Evaluated`. What is counted between two steps is in the
    row of the second, or in the round's row if the round ends before that. A row at the end holds what was
    counted after the last one.
    """

    def __init__(self, *sinks: Sink, wall_clock: Callable[[], float], earlier: Sequence[Row] = ()) -> None:
        """
        Args:
            wall_clock: Unix seconds now; virtual seconds in virtual time.
            earlier: in a resumed run, the rows before the resume (`metrics.read_rows`).
        """
        self._sinks = Recorder(*sinks)
        self._wall_clock = wall_clock
        last = (steps_of(earlier) or [{"step": 0, "num_tokens": 0}])[-1]
        self._step, self._num_tokens = last["step"], last["num_tokens"]
        self._round = 0
        self._last_end_s = 0.0
        self._cost: float | None = None
        """Cost of the run until now; None: it has no prices."""
        self._cost_before: Row = {}
        """Cost at the last row of each kind, by the figure that has the difference."""
        self._guards: list[float] = []
        self._controller_lags: list[float] = []
        self._stages: Row = {}
        self._arrivals: list[Arrival] = []
        self._counts: Counter[str] = Counter()
        self._open: _OpenRound | None = None
        self._bounds, self._biases = BoundMeter(), BiasMeter()

    def on(self, event: Event) -> None:
        self._sinks.emit(event)
        self._bounds.on(event)
        self._biases.on(event)
        if self._open:
            self._open.measure(event)
        match event:
            case events.RoundStarted():
                self._round, self._last_end_s = event.round, event.time_s
                self._open = _OpenRound(event)
            case events.Spent():
                self._cost = event.cost
                self._cost_before = self._cost_before or dict.fromkeys(COSTS_OF_ROWS, event.cost)
            case events.Stepped():
                self._emit(self._step_figures(event) | self._costs("cost/step"))
            case events.RoundEnded():
                self._last_end_s = event.time_s
                if self._open and self._open.lengths_by_step:
                    self._end_round(self._open.figures(event.time_s) | self._costs("round/cost"))
                self._open = None
            case events.Evaluated():
                self._sinks.emit(self._evaluation_figures(event))
            case events.EssTaken():
                self._guards.append(event.ess)
            case events.ControllerLag():
                self._controller_lags.append(event.lag_s)
            case events.WeightsProbed():
                self._arrivals.append(event.arrival)
                if event.arrival.cause:
                    self._counts[f"probe/failed/{event.engine}"] += 1
            case events.StagesFilled():
                for name, (most, blocked_s) in event.stages.items():
                    self._stages |= {f"stage/groups/{name}": most, f"stage/blocked_s/{name}": blocked_s}
            case events.PoolsFilled():
                self._stages |= in_family("pool/", event.rows.items())
            case _:
                self._count(event)

    def close(self) -> None:
        if self._counts:
            self._emit(self._place(self._last_end_s) | self._costs("cost/step"))
        self._sinks.close()

    def _end_round(self, row: Row) -> None:
        main_time_s, compute_s = row["round/main_time_s"], row["round/trainer_compute_s"]
        row["round/bound_s"], bound = self._bounds.end_round(main_time_s, compute_s)
        self._sinks.emit(bound)
        self._emit(row)

    def _emit(self, row: Row) -> None:
        """Emit a row with what was counted since the last one."""
        counts, self._counts = self._counts, Counter()
        self._sinks.emit(ordered({**row, **counts}))

    def _place(self, time_s: float) -> Row:
        return {"step": self._step, "round": self._round, "time": time_s, "wall_time": self._wall_clock()}

    def _costs(self, name: str) -> Row:
        """The cost since the last row of a kind, and that of the run; none without prices."""
        if self._cost is None:
            return {}
        before, self._cost_before[name] = self._cost_before[name], self._cost
        return {name: self._cost - before, "cost/total": self._cost}

    def _evaluation_figures(self, event: events.Evaluated) -> Row:
        booked = {"step": event.step, "eval/version": event.version, "eval/solved": event.solved}
        return {
            **self._place(event.time_s),
            **{name: value for name, value in booked.items() if value is not None},
            "round": event.round,
            "eval/reward": event.reward,
            "eval/mean_tokens": event.mean_tokens,
            "eval/num_samples": event.num_samples,
            **in_family("eval/", event.sets.items()),
        }

    def _step_figures(self, event: events.Stepped) -> Row:
        stats, samples = event.stats, event.samples
        step_s = event.end_s - self._last_end_s
        self._step, self._last_end_s = stats.num_steps, event.end_s
        self._num_tokens += sum(sample.num_sequence_tokens for sample in samples)
        row: Row = {
            **self._place(event.end_s),
            "num_tokens": self._num_tokens,
            "tokens/trained": stats.num_tokens,
            "samples/trained": len(samples),
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
            "entropy": stats.entropy,
            "clip_ratio/region_mean": stats.clip_ratio,
            "kl": stats.reference_kl,
            "mismatch_kl": stats.kl,
            "ess": stats.ess,
            "value_loss": stats.value_loss,
            "skipped": int(stats.skipped),
            "time/step": step_s,
            "time/wait": max(0.0, step_s - stats.compute_s),
            "time/train": stats.compute_s,
            "perf/tokens_per_s": stats.num_tokens / step_s if step_s else 0.0,
            **stats.gpu,
            **_reward_figures(samples),
            **length_figures("completions/", [sample.num_tokens for sample in samples]),
            "completions/clipped_ratio": fmean(sample.finish_reason == "length" for sample in samples),
            **episode_figures(samples),
            **event.lags.figures(len(samples)),
            **_group_figures(samples, self._round),
            **_control_figures(samples),
            **self._biases.figures(),
            **self._stages,
        }
        if stats.engine_mismatch_kl is not None:
            row["engine_mismatch_kl"] = stats.engine_mismatch_kl
        if self._guards:
            row["ess/guard"] = min(self._guards)
        if self._controller_lags:
            row["time/controller_lag"] = max(self._controller_lags)
        if self._arrivals:
            row["probe/difference"] = max(each.difference for each in self._arrivals)
            row["probe/time_s"] = sum(each.seconds for each in self._arrivals)
        for arrival in self._arrivals:
            for own, name in MEMORY.items():
                if own in arrival.gpu:
                    row[name] = max(row.get(name, 0.0), arrival.gpu[own])
        self._guards.clear()
        self._arrivals.clear()
        self._controller_lags.clear()
        return row

    def _count(self, event: Event) -> None:
        counts = self._counts
        match event:
            case events.RequestEnded() if event.sample.prompt >= 0 and event.num_gained:
                counts["tokens/generated"] += event.num_gained
            case events.SampleScored(failure=str(reason)):
                counts["completions/failed/" + _slug(reason)] += 1
            case events.TokensWasted():
                counts["tail/wasted_tokens/" + _slug(event.reason)] += event.num_tokens
            case events.GroupEnded(fate="trained"):
                counts["groups/trained"] += 1
            case events.GroupEnded(fate="filtered"):
                counts["groups/filtered/" + _slug(event.reason)] += 1
            case events.GroupEnded():
                counts["groups/dropped/" + _slug(event.reason)] += 1
            case events.Published(kv="recompute"):
                counts["kv/recomputed"] += 1
            case events.EngineStateChanged(state="dead"):
                counts["engines/died/" + event.engine] += 1
            case events.Preempted():
                counts["engines/preempted/" + event.engine] += event.num_requests
            case events.Decoded(drafts=True):
                counts["drafts/checked"] += event.sums.checked
                counts["drafts/accepted"] += event.sums.accepted
            case events.RowSkipped():
                counts["rows/skipped/" + _slug(event.reason)] += 1
            case events.BooksClosed():
                counts["groups/parked"] = event.num_parked_groups
                counts["tokens/parked"] = event.num_parked_tokens
                counts["tokens/drafted"] = event.num_drafted_tokens


def _reward_figures(samples: Sequence[Sample]) -> Row:
    groups = list(dict.fromkeys(sample.group for sample in samples))
    rewards = [_known_rewards(group.trainable) for group in groups]
    if max(map(len, rewards)) == 1:  # they are compared with one another
        rewards = [list(chain.from_iterable(rewards))]
    stds = list(map(standard_deviation, rewards))
    rewarded = [(each.prompt.source, each.reward) for each in samples if each.reward is not None]
    return {
        "reward": mean(_known_rewards(samples)),
        **_means("rewards/", chain.from_iterable(sample.reward_metrics.items() for sample in samples)),
        **_means("reward/source/", (each for each in rewarded if each[0])),
        "reward_std": mean(stds),
        "frac_reward_zero_std": stds.count(0.0) / len(stds),
    }


def _group_figures(samples: Sequence[Sample], round: int) -> Row:
    groups = list(dict.fromkeys(sample.group for sample in samples))
    lengths = [[sample.num_tokens for sample in group.trainable] for group in groups]
    return {
        "completions/std_length_in_group": fmean(map(standard_deviation, lengths)),
        **mean_and_max("versions", [len({span.version for span in sample.spans}) for sample in samples]),
        **mean_and_max("deferrals", [group.deferrals for group in groups]),
        **mean_and_max("age", [round - group.round_drawn for group in groups]),
    }


def _control_figures(samples: Sequence[Sample]) -> Row:
    control = [sample for sample in samples if sample.group.has_rules is False]
    if not control:
        return {}
    mean_length, reward = fmean(sample.num_tokens for sample in control), mean(_known_rewards(control))
    return {"control/samples": len(control), "control/mean_length": mean_length, "control/reward": reward}


def _means(prefix: str, items: Iterable[tuple[str, float]]) -> Row:
    """The mean of the values of each name, in the order of the names."""
    values: dict[str, list[float]] = {}
    for name, value in items:
        values.setdefault(name, []).append(value)
    return in_family(prefix, ((name, fmean(values[name])) for name in sorted(values)))


def _known_rewards(samples: Iterable[Sample]) -> list[float]:
    return [sample.reward for sample in samples if sample.reward is not None]


def _slug(reason: str) -> str:
    return reason.replace(" ", "_")
