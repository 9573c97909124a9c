"""summary.json: what a whole run came to, added up from its rows. A resumed run reads the rows that were
written before it was killed, and counts them, too."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import msgspec

from tailrace.record.events import Event
from tailrace.record.rows import ClosingRow, Counts, EvaluationRow, RoundRow, Row, StepRow


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
    """Tokens of groups that were parked at the end."""
    wasted: dict[str, int]
    """By reason."""

    @property
    def waste_share(self) -> float:
        """Wasted tokens as a share of the generated ones."""
        return sum(self.wasted.values()) / self.generated if self.generated else 0.0


@dataclass(frozen=True, slots=True)
class Ages:
    """How old what was trained had become. Means are over trained tokens."""

    staleness_mean: float
    """Publications between the weights that produced a token and the published ones."""
    staleness_max: float
    publications_max: float
    """The same as staleness_max."""
    lag_mean: float
    """Optimizer steps between the weights that produced a token and those that were trained (PipelineRL
    2.2)."""
    lag_max: float
    carried_tokens: float
    """Share of tokens older than the published weights."""
    versions_max: float
    """Versions of the weights that produced one sample."""
    deferrals_max: float
    """How often one group was parked or deferred."""
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


class Summary:
    """Sink: adds the rows of a run up, and writes summary.json at the end if it has a path."""

    def __init__(self, path: Path | None = None, *, earlier: Iterable[Row] = ()) -> None:
        """
        Args:
            path: the file to write.
            earlier: in a resumed run, the rows before the resume (`metrics.read_rows`).
        """
        self._path = path
        self._steps: list[StepRow] = []
        self._rounds: list[RoundRow] = []
        self._accuracies: list[float] = []
        self._counts = Counts()
        for row in earlier:
            self.on(row)

    def on(self, event: Event) -> None:
        match event:
            case StepRow():
                self._steps.append(event)
                self._counts = self._counts.plus(event.counts)
            case RoundRow():
                self._rounds.append(event)
                self._counts = self._counts.plus(event.counts)
            case ClosingRow():
                self._counts = self._counts.plus(event.counts)
            case EvaluationRow():
                self._accuracies.append(event.accuracy)

    def close(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            encoded = msgspec.json.encode(self.summary())
            self._path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")

    def summary(self) -> RunSummary:
        """The summary of all rows so far; complete after `close`."""
        counts, steps = self._counts, self._steps
        return RunSummary(
            eval=_first_last(self._accuracies),
            reward=_first_last([row.reward for row in steps]),
            rounds=len(self._rounds),
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
            ages=self._ages(),
            mismatch_kl=self._mean("mismatch_kl") if steps else None,
            round=self._medians(),
        )

    def _mean(self, figure: str) -> float:
        """Mean of a figure of the steps over trained tokens."""
        num_tokens = sum(row.trained_tokens for row in self._steps)
        total: float = sum(getattr(row, figure) * row.trained_tokens for row in self._steps)
        return total / max(1, num_tokens)

    def _ages(self) -> Ages:
        def largest(figure: str) -> float:
            return max((float(getattr(row, figure)) for row in self._steps), default=0.0)

        return Ages(
            staleness_mean=self._mean("staleness_mean"),
            staleness_max=largest("staleness_max"),
            publications_max=largest("staleness_max"),
            lag_mean=self._mean("lag_mean"),
            lag_max=largest("lag_max"),
            carried_tokens=self._mean("carried_tokens"),
            versions_max=largest("versions_max"),
            deferrals_max=largest("deferrals_max"),
            rounds_max=largest("age_max"),
        )

    def _medians(self) -> RoundMedians:
        def of(figure: str) -> float | None:
            values = [value for row in self._rounds if (value := getattr(row, figure)) is not None]
            return median(values) if values else None

        return RoundMedians(**{figure.name: of(figure.name) for figure in fields(RoundMedians)})


def _first_last(values: list[float]) -> FirstLast | None:
    return FirstLast(values[0], values[-1]) if values else None
