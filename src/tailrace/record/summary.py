"""Totals of a whole run (summary.json), and of one run of a schedule in a comparison (a trial).

Both follow from the rows by the table in `figures.py`. A resumed run also counts the rows that were written
before it was killed.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import inf
from operator import itemgetter
from pathlib import Path
from statistics import median
from zlib import compress, decompress

import msgspec

from tailrace.record.advisories import Advisor
from tailrace.record.bounds import RoundBound
from tailrace.record.events import Event, Row
from tailrace.record.figures import (
    BIASES,
    COSTS,
    FIGURES,
    TRIAL_FIGURES,
    Figure,
    Rows,
    counts_of,
    evaluations_of,
    family,
    in_family,
    over_tokens,
    rounds_of,
    steps_of,
    summed,
)


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
    """generated = trained + masked + parked + drafted + wasted."""

    generated: int
    trained: int
    masked: int
    """Tokens of trained samples that were too old for the loss."""
    parked: int
    drafted: int
    """Tokens that were drawn for a later round, whose weights had not verified them."""
    wasted: dict[str, int]
    """Tokens, by the reason of their waste."""


@dataclass(frozen=True, slots=True)
class BoundSummary:
    """The distance to the lower bounds of `bounds.py`."""

    bound_s: float
    """Median over the rounds."""
    share: float
    """Share of the main time: median over the rounds. 1 is the best."""
    run_share: float
    """The bound of the whole run, as a share of its time. Of a resumed run: of its last process."""
    run_time_s: float
    """From the first round's start to the end of the last optimizer step, in seconds."""
    worst: str
    """The round of the last process that is farthest from its bound in seconds, and why."""

    @property
    def line(self) -> str:
        """All figures as a sentence."""
        best = f"{self.run_share * self.run_time_s:.1f} s in place of {self.run_time_s:.1f} s"
        run = f"under any schedule these samples take at best {best}, a round {self.bound_s:.1f} s (median)"
        return f"{run}; the farthest from it: {self.worst}"


@dataclass(frozen=True, slots=True)
class RunSummary:
    eval: FirstLast | None
    """Mean reward on held-out prompts; None if there was no evaluation."""
    reward: FirstLast | None
    """Mean reward of the first and of the last round; None if no round trained."""
    rounds: int
    """Rounds that trained."""
    steps: int
    groups: GroupCounts
    tokens: TokenCounts
    failures: dict[str, int]
    """Samples whose reward failed or timed out, by reason."""
    rows_skipped: dict[str, int]
    """Rows of the data that could not become a prompt, by reason."""
    ages: dict[str, float]
    """Ages of the trained tokens and groups."""
    mismatch_kl: float | None
    """KL of behaviour to current policy, in nats a token; None if there was no step."""
    round: dict[str, float | None]
    """The median of figures over the rounds; None where no round has one."""
    bound: BoundSummary | None
    """Distance to the lower bound; None: no round trained."""
    ettr: float | None = None
    """Effective training time ratio; None: no round trained."""
    bias: dict[str, float] = field(default_factory=dict)
    """Differences of what was trained and what was drawn; with control groups, also the bias of the rules of
    groups."""
    cost: float | None = None
    """Cost of all processes of the run, in the currency of [prices]; None without prices."""
    solved: FirstLast | None = None
    """Share of held-out samples whose reward is at least `run.eval_solved_at`; None if there was no
    evaluation."""
    advisories: dict[str, str] = field(default_factory=dict)
    """Advice for a person, by its kind, with the step at which it appeared."""

    @property
    def words(self) -> dict[str, str]:
        """Words on what a person asks first, by what it is."""
        found = {}
        if self.eval:
            solved = self.solved
            shares = f", solved {solved.first:.1%} -> {solved.last:.1%}" if solved else ""
            found["held-out reward"] = f"{self.eval.first:.3f} -> {self.eval.last:.3f}{shares}"
        if self.reward:
            found["reward of rounds"] = f"{self.reward.first:.3f} -> {self.reward.last:.3f}"
        tokens = f"{self.tokens.trained:,} trained of {self.tokens.generated:,} generated"
        found |= {"steps": f"{self.steps} in {self.rounds} rounds", "tokens": tokens}
        return found | ({"bound": self.bound.line} if self.bound else {}) | self.advisories

    def __str__(self) -> str:
        return "\n".join(f"{name:16} {text}" for name, text in self.words.items())

    def _repr_html_(self) -> str:
        """The form in a notebook."""
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self.words.items()
        )
        return f"<table>{''.join(rows)}</table>"


class Summary:
    """Sink: keeps the rows of a run, and writes summary.json at the end if it has a path. Rows are packed:
    as dicts those of a long run would take ten times the memory."""

    def __init__(self, path: Path | None = None, *, earlier: Iterable[Row] = ()) -> None:
        """`earlier`: in a resumed run, the rows before that."""
        self._path, self._advisor = path, Advisor()
        self._names, self._packed = list[tuple[str, ...]](), list[bytes]()
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.bound: RoundBound | None = None
        """The last one of this process."""
        self._worst = -inf, ""
        for row in earlier:
            self.on(row)

    def on(self, event: Event) -> None:
        if isinstance(event, RoundBound):
            self.bound = event
        elif isinstance(event, dict):
            self._names.append(self._known.setdefault(tuple(event), tuple(event)))
            self._packed.append(compress(array("d", event.values())))
            if "loss" in event:
                self._advisor.add(event)
            if self.bound and "round/time_s" in event:
                gap_s = event["round/main_time_s"] - event["round/bound_s"]
                self._worst = max(self._worst, (gap_s, self.bound.gap), key=itemgetter(0))

    @property
    def rows(self) -> list[Row]:
        """All rows so far, with floats as values."""
        rows = (array("d", decompress(row)) for row in self._packed)
        return [dict(zip(names, row, strict=True)) for names, row in zip(self._names, rows, strict=True)]

    def close(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            encoded = msgspec.json.encode(self.summary())
            self._path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")

    def summary(self) -> RunSummary:
        """The summary of all rows so far; complete after `close`."""
        rows = self.rows
        steps, rounds = steps_of(rows), rounds_of(rows)
        counts = {name: int(count) for name, count in counts_of(rows).items()}
        filtered, dropped = family(counts, "groups/filtered/"), family(counts, "groups/dropped/")
        return RunSummary(
            eval=_first_last([row["eval/reward"] for row in evaluations_of(rows)]),
            reward=_first_last([row["round/reward"] for row in rounds]),
            rounds=len(rounds),
            steps=int(steps[-1]["step"]) if steps else 0,
            groups=GroupCounts(
                trained=counts.get("groups/trained", 0),
                filtered=sum(filtered.values()),
                dropped=sum(dropped.values()),
                reasons=in_family("filtered/", filtered.items()) | in_family("dropped/", dropped.items()),
                parked=counts.get("groups/parked", 0),
            ),
            tokens=TokenCounts(
                generated=counts.get("tokens/generated", 0),
                trained=int(summed(steps, "tokens/trained")),
                masked=int(summed(steps, "tokens/masked")),
                parked=counts.get("tokens/parked", 0),
                drafted=counts.get("tokens/drafted", 0),
                wasted=family(counts, "tail/wasted_tokens/"),
            ),
            failures=family(counts, "completions/failed/"),
            rows_skipped=family(counts, "rows/skipped/"),
            ages=_kept("ages", steps),
            mismatch_kl=over_tokens(steps, "mismatch_kl") if steps else None,
            round={key: _median(rounds, each.name) for key, each in _kept_in("round")},
            bound=self._bound_summary(rounds),
            ettr=_totals(rows, ("ettr",))["ettr"] if rounds else None,
            bias=_totals(rows, BIASES) | _kept("bias", steps),
            cost=next((row["cost/total"] for row in reversed(rows) if "cost/total" in row), None),
            solved=_first_last([row["eval/solved"] for row in evaluations_of(rows) if "eval/solved" in row]),
            advisories=dict(self._advisor.found),
        )

    def figures(self, warm_up_rounds: int = 0) -> Row:
        """The figures of the trial by their keys there. Of the warm-up rounds only the counts count; at least
        one round after them has trained."""
        rows = [row if row["round"] >= warm_up_rounds else counts_of([row]) for row in self.rows]
        return _totals(rows, TRIAL_FIGURES)

    def _bound_summary(self, rounds: Sequence[Row]) -> BoundSummary | None:
        if not (last := self.bound):
            return None
        times = [(row["round/bound_s"], row["round/main_time_s"]) for row in rounds if "round/bound_s" in row]
        return BoundSummary(
            bound_s=median(bound_s for bound_s, _ in times),
            share=median(bound_s / time_s if time_s else 1.0 for bound_s, time_s in times),
            run_share=last.run_bound_s / last.run_time_s if last.run_time_s else 1.0,
            run_time_s=last.run_time_s,
            worst=self._worst[1],
        )


def _totals(rows: Rows, keys: Iterable[str]) -> Row:
    """Figures of TRIAL_FIGURES over the rows, without those that the run does not measure."""
    needed = {**dict.fromkeys(COSTS, "round/cost"), **dict.fromkeys(BIASES, "control/samples")}
    measured = (key for key in keys if key not in needed or any(needed[key] in row for row in rows))
    figures = ((key, TRIAL_FIGURES[key]) for key in measured)
    return {key: each.total(rows, each.name) for key, each in figures if each.total}


def _kept_in(section: str) -> Iterator[tuple[str, Figure]]:
    """The figures of a section of summary.json, with their keys there."""
    return ((each.kept[section], each) for each in FIGURES if section in each.kept)


def _kept(section: str, steps: Rows) -> dict[str, float]:
    """Figures of a section, over the steps."""
    return {key: each.total(steps, each.name) for key, each in _kept_in(section) if each.total}


def _median(rounds: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rounds if name in row]
    return median(values) if values else None


def _first_last(values: Sequence[float]) -> FirstLast | None:
    return FirstLast(values[0], values[-1]) if values else None
