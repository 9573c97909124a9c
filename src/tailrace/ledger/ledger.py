"""Ledger: two sums that must agree.

Every sample ends with exactly one fate: trained, or waste with a reason. What has none is parked or in
flight.

    tokens the engines produced = trained + held + wasted + evaluated   (the engines count on their own)
    prompts drawn               = trained + filtered + dropped + held

A journal, where the run has one, is told what ends, and writes all of it down (journal.py).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tailrace.clock import now
from tailrace.errors import LedgerError
from tailrace.record.events import GroupEnded, Recorder, TokensWasted
from tailrace.types import Group, Sample

Fate = Literal["trained", "filtered", "dropped"]


@dataclass(slots=True)
class Totals:
    """What has ended so far."""

    num_drawn: int = 0
    """Prompts drawn, rows that are no prompt included; also the number of the next one."""
    trained_tokens: int = 0
    wasted_tokens: Counter[str] = field(default_factory=Counter)
    """By reason."""
    groups: Counter[str] = field(default_factory=Counter)
    """Ended groups by fate."""
    evaluated_tokens: int = 0
    """Spent on evaluations: nobody's fate."""

    @property
    def num_known_tokens(self) -> int:
        return self.trained_tokens + self.wasted_tokens.total() + self.evaluated_tokens


class Settled(Protocol):
    """Who is told what ends."""

    def settle(self, sample: Sample, step: int | None) -> None:
        """A sample has its fate; step: the optimizer step that trained it."""

    def end(self, group: Group, reason: str) -> None:
        """A group has its fate."""


class Ledger:
    """The fate of every token and every prompt of a run, in memory."""

    def __init__(
        self, recorder: Recorder, totals: Totals | None = None, journal: Settled | None = None
    ) -> None:
        self.totals = totals or Totals()
        self._journal = journal
        self.living: dict[int, Group] = {}
        """Groups without a fate, by prompt, in the order drawn."""
        self._recorder = recorder

    def draw(self, group: Group) -> None:
        """A group comes to life."""
        self.totals.num_drawn += 1
        self.living[group.prompt.index] = group

    def recall(self, groups: Iterable[Group]) -> None:
        """Groups drawn in an earlier life of this run live on."""
        self.living.update((group.prompt.index, group) for group in groups)

    def waste(self, sample: Sample, reason: str) -> None:
        """The sample's tokens train nobody."""
        self._settle(sample, reason, None)
        self.totals.wasted_tokens[reason] += sample.num_tokens
        self._recorder.emit(TokensWasted(now(), sample.id, sample.num_tokens, reason))

    def train(self, samples: Iterable[Sample], step: int) -> None:
        """The samples went into an optimizer step. A group ends with the last of its samples."""
        groups: dict[Group, None] = {}
        for sample in samples:
            self._settle(sample, "trained", step)
            self.totals.trained_tokens += sample.num_tokens
            groups[sample.group] = None
        for group in groups:
            if all(sample.fate is not None for sample in group.kept):
                self.end(group, "trained", "trained")

    def end(self, group: Group, fate: Fate, reason: str) -> None:
        """A group has its fate."""
        if group.fate is not None:
            raise LedgerError(f"prompt {group.prompt.index} ended twice: {group.fate}, then {fate}")
        group.fate = fate
        self.totals.groups[fate] += 1
        del self.living[group.prompt.index]
        if self._journal:
            self._journal.end(group, reason)
        self._recorder.emit(GroupEnded(now(), group.prompt.index, fate, reason))

    def skip(self) -> None:
        """A row of the data could not become a prompt: drawn and dropped at once."""
        self.totals.num_drawn += 1
        self.totals.groups["dropped"] += 1

    @property
    def held_tokens(self) -> int:
        """Tokens of samples without a fate."""
        return sum(
            sample.num_tokens
            for group in self.living.values()
            for sample in group.samples
            if sample.fate is None
        )

    def check(self, num_generated: int) -> None:
        """Do the books close?

        Raises:
            LedgerError: tokens or prompts are unaccounted for.
        """
        totals = self.totals
        known = totals.num_known_tokens + self.held_tokens
        if num_generated != known:
            raise LedgerError(
                f"the engines produced {num_generated} tokens, the ledger knows {known}: "
                f"trained {totals.trained_tokens}, held {self.held_tokens}, "
                f"wasted {_by_reason(totals.wasted_tokens)}, evaluated {totals.evaluated_tokens}"
            )
        if totals.num_drawn != totals.groups.total() + len(self.living):
            raise LedgerError(
                f"{totals.num_drawn} prompts were drawn, the ledger knows {len(self.living)} living and "
                f"{_by_reason(totals.groups)}"
            )

    def _settle(self, sample: Sample, fate: str, step: int | None) -> None:
        if sample.fate is not None:
            raise LedgerError(f"sample {sample.id} ended twice: {sample.fate}, then {fate}")
        sample.fate = fate
        if self._journal:
            self._journal.settle(sample, step)


def _by_reason(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "none"
