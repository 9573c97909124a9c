"""summary.json: what a whole run came to. Added up from the rows of `steps.py`, so that a resumed run
counts what it did before it was killed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from tailrace.record.events import Event
from tailrace.record.steps import Row, StepMeter


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
    """Why they were filtered or dropped: 'filtered/zero_variance'."""
    parked: int
    """Drawn, and at the end neither trained nor given up."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    generated: int
    trained: int
    parked: int
    """Of groups that were parked at the end: generated = trained + parked + wasted."""
    wasted: dict[str, int]
    """By reason."""

    @property
    def waste_share(self) -> float:
        """Of all that was generated."""
        return sum(self.wasted.values()) / self.generated if self.generated else 0.0


@dataclass(frozen=True, slots=True)
class Ages:
    """How old what was trained had become; means over trained tokens, but where they say otherwise."""

    staleness_mean: float
    """In optimizer steps (PipelineRL's lag)."""
    staleness_max: float
    publications_max: float
    carried_tokens: float
    """Share of tokens older than the published weights."""
    versions_max: float
    """That produced one sample."""
    deferrals_max: float
    """How often a group was parked or put off."""
    rounds_max: float
    """From a group's draw to its training."""


@dataclass(frozen=True, slots=True)
class RoundMedians:
    """Each figure's median over the rounds (`rounds.RoundReport`); None where no round has it."""

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
    """Held-out accuracy, sampled; None if nothing was evaluated."""
    reward: FirstLast | None
    """Mean reward of the first and of the last step; None if nothing was trained."""
    rounds: int
    """That trained."""
    steps: int
    groups: GroupCounts
    tokens: TokenCounts
    failures: dict[str, int]
    """Samples that could not be rewarded, by reason."""
    rows_skipped: dict[str, int]
    """Rows of the data that could not become a prompt, by reason."""
    ages: Ages
    mismatch_kl: float | None
    """KL of behaviour to current policy, nats a token; None if nothing was trained."""
    round: RoundMedians


class Summary:
    """Sink: adds the run up, and writes summary.json at the end if given a path."""

    def __init__(self, path: Path | None = None, *, earlier: Iterable[Row] = ()) -> None:
        """earlier: the rows of a resumed run's earlier life (`metrics.read_rows`)."""
        self._path = path
        self._accuracies: list[float] = []
        self._rewards: list[float] = []
        self._rounds: list[Row] = []
        self._counts: Counter[str] = Counter()
        self._steps = 0
        self._parked = (0, 0)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._largest: defaultdict[str, float] = defaultdict(float)
        for row in earlier:
            self._add(row)
        self._meter = StepMeter(self._add, step=self._steps)

    def on(self, event: Event) -> None:
        self._meter.on(event)

    def close(self) -> None:
        self._meter.close()
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            encoded = msgspec.json.encode(self.summary())
            self._path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")

    def summary(self) -> RunSummary:
        """Of all complete rows; complete after `close`."""
        filtered, dropped = self._reasons("groups/filtered/"), self._reasons("groups/dropped/")
        return RunSummary(
            eval=_first_last(self._accuracies),
            reward=_first_last(self._rewards),
            rounds=len(self._rounds),
            steps=self._steps,
            groups=GroupCounts(
                trained=self._counts["groups/trained"],
                filtered=sum(filtered.values()),
                dropped=sum(dropped.values()),
                reasons=self._reasons("groups/", "filtered/") | self._reasons("groups/", "dropped/"),
                parked=self._parked[0],
            ),
            tokens=TokenCounts(
                generated=self._counts["tokens/generated"],
                trained=self._counts["num_tokens"],
                parked=self._parked[1],
                wasted=self._reasons("tail/wasted_tokens/"),
            ),
            failures=self._reasons("completions/failed/"),
            rows_skipped=self._reasons("rows/skipped/"),
            ages=self._ages(),
            mismatch_kl=self._mean("mismatch_kl") if self._rewards else None,
            round=self._medians(),
        )

    def _add(self, row: Row) -> None:
        self._steps = int(row["step"])
        if "eval/accuracy" in row:
            self._accuracies.append(row["eval/accuracy"])
        if "reward" in row:
            self._rewards.append(row["reward"])
        if "round/main_time_s" in row:
            self._rounds.append(row)
        if "groups/parked" in row:
            self._parked = int(row["groups/parked"]), int(row["tokens/parked"])
        for key, value in row.items():
            if key == "num_tokens" or key.startswith(COUNTED):
                self._counts[key] += int(value)
            elif key in AVERAGED:
                self._sums[key] += value * row["num_tokens"]
            elif key in LARGEST:
                self._largest[key] = max(self._largest[key], value)

    def _mean(self, key: str) -> float:
        """Over trained tokens."""
        return self._sums[key] / max(1, self._counts["num_tokens"])

    def _ages(self) -> Ages:
        return Ages(
            staleness_mean=self._mean("staleness/mean"),
            staleness_max=self._largest["staleness/max"],
            publications_max=self._largest["staleness/publications"],
            carried_tokens=self._mean("carried/tokens"),
            versions_max=self._largest["versions/max"],
            deferrals_max=self._largest["deferrals/max"],
            rounds_max=self._largest["age/max"],
        )

    def _reasons(self, room: str, kind: str = "") -> dict[str, int]:
        """Counts by what stands after `room` in their key, of the keys that go on with `kind`."""
        prefix = room + kind
        return {key[len(room) :]: n for key, n in self._counts.items() if key.startswith(prefix)}

    def _medians(self) -> RoundMedians:
        def of(figure: str) -> float | None:
            key = f"round/{figure}"
            return median(values) if (values := [row[key] for row in self._rounds if key in row]) else None

        return RoundMedians(
            main_time_s=of("main_time_s"),
            rollout_time_s=of("rollout_time_s"),
            first_dispatch_s=of("first_dispatch_s"),
            trainer_compute_s=of("trainer_compute_s"),
            wait_s=of("wait_s"),
            waiting_ratio=of("waiting_ratio"),
            start_ratio=of("start_ratio"),
            publish_s=of("publish_s"),
            generated_tokens_per_s=of("generated_tokens_per_s"),
        )


COUNTED = ("groups/", "tokens/", "tail/wasted_tokens/", "completions/failed/", "rows/skipped/")
"""Keys whose values add up over rows."""
AVERAGED = ("staleness/mean", "carried/tokens", "mismatch_kl")
"""Keys whose values are means over a row's tokens."""
LARGEST = ("staleness/max", "staleness/publications", "versions/max", "deferrals/max", "age/max")


def _first_last(values: list[float]) -> FirstLast | None:
    return FirstLast(values[0], values[-1]) if values else None
