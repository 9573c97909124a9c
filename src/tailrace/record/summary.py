"""summary.json: what a whole run came to, added up from its rows. A resumed run reads the rows that were
written before it was killed, and counts them, too."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from pathlib import Path
from statistics import median

import msgspec

from tailrace.record.events import Event
from tailrace.record.rows import Counts, EvaluationRow, RoundRow, Row, StepRow


@dataclass(frozen=True, slots=True)
class FirstLast:
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class GroupCounts:
    trained: int
    filtered: int
    dropped: int
    reasons: dict[str, int]
    """Groups filtered and dropped, by reason: 'filtered/zero_variance'."""
    parked: int
    """Groups that were drawn and at the end neither trained nor given up."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """generated = trained + parked + wasted."""

    generated: int
    trained: int
    parked: int
    wasted: dict[str, int]
    """By reason."""


@dataclass(frozen=True, slots=True)
class Ages:
    """How old what was trained had become: figures of `rows.StepRow`, as means over trained tokens and as
    maxima over steps."""

    staleness_mean: float
    staleness_max: float
    lag_mean: float
    lag_max: float
    carried_tokens: float
    versions_max: float
    deferrals_max: float
    rounds_max: float
    """Rounds from a group's draw to its training."""


@dataclass(frozen=True, slots=True)
class RoundMedians:
    """The median of each figure over the rounds (`rows.RoundRow`); None where no round has it."""

    main_time_s: float | None
    rollout_time_s: float | None
    first_dispatch_s: float | None
    trainer_compute_s: float | None
    wait_s: float | None
    waiting_ratio: float | None
    start_ratio: float | None
    publish_s: float | None
    generated_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class BoundSummary:
    """The distance to the lower bounds of `bounds.py`."""

    bound_s: float
    """Median over the rounds."""
    share: float
    """Of the main time: median over the rounds. 1 is the best."""
    run_share: float
    """The bound of the whole run, as a share of its time. Of a resumed run: of its last process."""
    worst: str
    """The round that is farthest from its bound in seconds, and why. Of a resumed run: in its last
    process."""

    @property
    def line(self) -> str:
        """All figures on one line."""
        rounds = f"{self.bound_s:.1f} s, {self.share:.0%} of the main time in the median of rounds"
        return f"{rounds}; of the whole run {self.run_share:.0%}; {self.worst}"


@dataclass(frozen=True, slots=True)
class RunSummary:
    eval: FirstLast | None
    """Accuracy on held-out prompts, sampled; None if there was no evaluation."""
    reward: FirstLast | None
    """Mean reward of the first and of the last step; None if there was no step."""
    rounds: int
    """Rounds that trained."""
    steps: int
    groups: GroupCounts
    tokens: TokenCounts
    failures: dict[str, int]
    """Samples whose reward failed or timed out, by reason."""
    rows_skipped: dict[str, int]
    """Rows of the data that could not become a prompt, by reason."""
    ages: Ages
    mismatch_kl: float | None
    """KL of behaviour to current policy, in nats a token; None if there was no step."""
    round: RoundMedians
    bound: BoundSummary | None
    """None if no round trained."""


class Summary:
    """Sink: keeps the rows of a run, and writes summary.json at the end if it has a path."""

    def __init__(self, path: Path | None = None, *, earlier: Iterable[Row] = ()) -> None:
        """
        Args:
            path: the file to write.
            earlier: in a resumed run, the rows before the resume (`metrics.read_rows`).
        """
        self._path = path
        self._rows = list(earlier)

    def on(self, event: Event) -> None:
        if isinstance(event, Row):
            self._rows.append(event)

    def close(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            encoded = msgspec.json.encode(self.summary())
            self._path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")

    def summary(self) -> RunSummary:
        """The summary of all rows so far; complete after `close`."""
        steps = [row for row in self._rows if isinstance(row, StepRow)]
        rounds = [row for row in self._rows if isinstance(row, RoundRow)]
        counted = (row.counts for row in self._rows if not isinstance(row, EvaluationRow))
        counts = reduce(Counts.plus, counted, Counts())
        return RunSummary(
            eval=_first_last([row.accuracy for row in self._rows if isinstance(row, EvaluationRow)]),
            reward=_first_last([row.reward for row in steps]),
            rounds=len(rounds),
            steps=steps[-1].step if steps else 0,
            groups=GroupCounts(
                trained=counts.groups_trained,
                filtered=sum(counts.groups_filtered.values()),
                dropped=sum(counts.groups_dropped.values()),
                reasons={f"filtered/{reason}": n for reason, n in counts.groups_filtered.items()}
                | {f"dropped/{reason}": n for reason, n in counts.groups_dropped.items()},
                parked=counts.groups_parked or 0,
            ),
            tokens=TokenCounts(
                generated=counts.generated,
                trained=sum(row.trained_tokens for row in steps),
                parked=counts.tokens_parked or 0,
                wasted=dict(counts.wasted),
            ),
            failures=dict(counts.failed),
            rows_skipped=dict(counts.rows_skipped),
            ages=Ages(
                staleness_mean=_mean(steps, "staleness_mean"),
                staleness_max=_max(steps, "staleness_max"),
                lag_mean=_mean(steps, "lag_mean"),
                lag_max=_max(steps, "lag_max"),
                carried_tokens=_mean(steps, "carried_tokens"),
                versions_max=_max(steps, "versions_max"),
                deferrals_max=_max(steps, "deferrals_max"),
                rounds_max=_max(steps, "age_max"),
            ),
            mismatch_kl=_mean(steps, "mismatch_kl") if steps else None,
            round=RoundMedians(**{each.name: _median(rounds, each.name) for each in fields(RoundMedians)}),
            bound=_bound(rounds),
        )


def _bound(rounds: Sequence[RoundRow]) -> BoundSummary | None:
    bounds = [(row.bound_s, row.main_time_s) for row in rounds if row.bound_s is not None]
    told = [(row.main_time_s - (row.bound_s or 0.0), row.bound) for row in rounds if row.bound]
    if not told:
        return None
    _, last = told[-1]
    _, worst = max(told, key=lambda pair: pair[0])
    return BoundSummary(
        bound_s=median(bound_s for bound_s, _ in bounds),
        share=median(bound_s / time_s if time_s else 1.0 for bound_s, time_s in bounds),
        run_share=last.run_bound_s / last.run_time_s if last.run_time_s else 1.0,
        worst=worst.gap,
    )


def _mean(steps: Sequence[StepRow], figure: str) -> float:
    """Mean over trained tokens."""
    num_tokens = sum(row.trained_tokens for row in steps)
    total: float = sum(getattr(row, figure) * row.trained_tokens for row in steps)
    return total / max(1, num_tokens)


def _max(steps: Sequence[StepRow], figure: str) -> float:
    return max((float(getattr(row, figure)) for row in steps), default=0.0)


def _median(rounds: Sequence[RoundRow], figure: str) -> float | None:
    values = [value for row in rounds if (value := getattr(row, figure)) is not None]
    return median(values) if values else None


def _first_last(values: Sequence[float]) -> FirstLast | None:
    return FirstLast(values[0], values[-1]) if values else None
