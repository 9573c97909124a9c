"""What a store is: rows of a few tables, committed together or not at all.

    run         one row: the config, how many prompts were drawn, how many tokens evaluations took
    lives       one a process: where it began
    marks       one a checkpoint: where the run stood
    groups      one a prompt: from draw to fate
    samples     one a sample: who produced its tokens, its reward, its fate
    tokens      what samples gained from cut to cut; removed when nobody can need it any more
    trainings   one a trained sample and life

Rows hold plain values; a row replaces the one with the same key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import msgspec
from pydantic import Field, model_validator

from tailrace.settings import Settings
from tailrace.types import FinishReason, SampleId

FORMAT = 1
"""Of the rows; another one cannot be read."""


class LedgerSettings(Settings):
    """Where the run's ledger outlives its process."""

    kind: Literal["sqlite", "redis", "memory"] = "sqlite"
    """sqlite: ledger.sqlite in the output directory. redis: a server. memory: nowhere, so that the run cannot
    be resumed."""
    url: str | None = None
    """Of the Redis server: redis://host:6379/0."""
    flush_s: float = Field(default=0.2, gt=0)
    """What changed is written this often; a kill loses what was generated since, counted as waste."""

    @model_validator(mode="after")
    def _check(self) -> "LedgerSettings":
        if (self.kind == "redis") != (self.url is not None):
            raise ValueError("kind 'redis' needs a url (redis://host:6379/0), and no other kind has one")
        return self


class Row(msgspec.Struct, frozen=True, array_like=True):
    """The first `num_keys` fields are its key."""

    table: ClassVar[str]
    num_keys: ClassVar[int] = 1


class RunRow(Row, frozen=True, array_like=True):
    table: ClassVar[str] = "run"

    format: int
    config_digest: str
    num_drawn: int
    """Prompts drawn; also the number of the next one."""
    evaluated_tokens: int


class LifeRow(Row, frozen=True, array_like=True):
    table: ClassVar[str] = "lives"

    life: int
    """1, 2, ..."""
    parent: int
    """The life whose checkpoint it began with; 0: none."""
    round: int
    version: int
    step: int
    """Round, version and optimizer steps at its beginning."""
    crash_tokens: int
    """What the engines of earlier lives had produced and no cut had seen."""


class MarkRow(Row, frozen=True, array_like=True):
    table: ClassVar[str] = "marks"
    num_keys: ClassVar[int] = 2

    life: int
    round: int
    """At whose top it stands."""
    version: int
    step: int
    """Optimizer steps made."""
    checkpoint: str
    """The name of its folder."""
    partial_rollouts: str
    """The parked prompts in their order, as JSON."""
    longest: str = "{}"
    """What rollout/history.py knows, as JSON: {row of the data: tokens}. Only the last two marks have it."""
    steps_at: str = "{}"
    """Optimizer steps at each publication, as JSON. Only the last two marks have it."""
    undone: int | None = None
    """The life that went back behind it."""


class GroupRow(Row, frozen=True, array_like=True):
    table: ClassVar[str] = "groups"

    prompt: int
    life: int
    round: int
    """When it was drawn."""
    num_required: int
    num_launched: int
    attempt: int
    deferrals: int
    kept: str
    """Numbers of the kept samples in the order they finished, as JSON."""
    fate: str | None
    reason: str = ""
    """Of the fate."""


class SampleRow(Row, frozen=True, array_like=True):
    table: ClassVar[str] = "samples"
    num_keys: ClassVar[int] = 3

    prompt: int
    attempt: int
    number: int
    spans: str
    """[[life, version, num_tokens], ...] as JSON: which publication of which life produced which tokens."""
    finish_reason: FinishReason | None
    text: str
    reward: float | None
    failure: str | None
    fate: str | None
    pruned: bool = False
    """Its tokens, text and reference log-probs are not stored any more."""
    reference_logprobs: bytes = b""
    """float32: of its tokens, under the reference model."""

    @property
    def id(self) -> SampleId:
        return SampleId(self.prompt, self.attempt, self.number)

    @property
    def origins(self) -> list["Origin"]:
        return msgspec.json.decode(self.spans, type=list[Origin])

    @property
    def num_tokens(self) -> int:
        return sum(origin.num_tokens for origin in self.origins)


class TokensRow(Row, frozen=True, array_like=True):
    table: ClassVar[str] = "tokens"
    num_keys: ClassVar[int] = 4

    prompt: int
    attempt: int
    number: int
    start: int
    """Place of the first of them."""
    ids: bytes
    """int32, as the machine orders bytes."""
    logprobs: bytes
    """float32: what the trainer computes with."""


class TrainingRow(Row, frozen=True, array_like=True):
    table: ClassVar[str] = "trainings"
    num_keys: ClassVar[int] = 4

    life: int
    prompt: int
    attempt: int
    number: int
    step: int
    undone: int | None = None
    """The life that went back behind it: it no longer counts."""

    @property
    def id(self) -> SampleId:
        return SampleId(self.prompt, self.attempt, self.number)


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one publication."""

    life: int
    version: int
    num_tokens: int


ROWS: tuple[type[Row], ...] = (RunRow, LifeRow, MarkRow, GroupRow, SampleRow, TokensRow, TrainingRow)


@dataclass(frozen=True, slots=True)
class Cut:
    """What changed between two moments."""

    rows: Sequence[Row]
    pruned: Sequence[SampleId] = ()
    """Samples whose tokens are to be removed."""


@dataclass(slots=True)
class Books:
    """All that a store holds."""

    run: RunRow
    lives: dict[int, LifeRow]
    marks: list[MarkRow]
    groups: dict[int, GroupRow]
    samples: dict[SampleId, SampleRow]
    trainings: dict[tuple[int, SampleId], TrainingRow]
    """By life and sample."""
    tokens: dict[SampleId, list[TokensRow]] = field(default_factory=dict)
    """In their order."""


class Store(Protocol):
    """Keeps cuts. Blocks; who must not wait calls it on another thread, one call at a time."""

    name: str
    """What a person calls it: a path or a URL."""

    def commit(self, cut: Cut) -> None:
        """All of it or nothing.

        Raises:
            LedgerError: it cannot be written, with the remedy; what was there is as it was.
        """

    def rows(self, kind: type[Row]) -> list[Row]:
        """A whole table, by key.

        Raises:
            LedgerError: it is damaged.
        """

    def close(self) -> None: ...
