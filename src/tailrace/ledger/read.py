"""Reads all rows of a store and checks that they are consistent."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from tailrace.errors import LedgerError
from tailrace.ledger.base import (
    FORMAT,
    Books,
    GroupRow,
    LifeRow,
    MarkRow,
    Row,
    RunRow,
    SampleRow,
    Store,
    TokensRow,
    TrainingRow,
)
from tailrace.types import SampleId

R = TypeVar("R", bound=Row)
_TOKEN_BYTES = 4


def read_books(store: Store, *, tokens: bool = True) -> Books:
    """Read the books of a run.

    Args:
        tokens: whether to read the tokens of the samples, which are most of the data.

    Raises:
        LedgerError: the store is damaged, or of another format.
    """
    runs = _rows(store, RunRow)
    if len(runs) != 1 or runs[0].format != FORMAT:
        raise LedgerError(
            f"{store.name} holds no ledger that this version of tailrace reads (format {FORMAT}); resume "
            "with the version that wrote it, or begin a new run in another --output-dir"
        )
    try:
        books = Books(
            run=runs[0],
            lives={row.life: row for row in _rows(store, LifeRow)},
            marks=_rows(store, MarkRow),
            groups={row.prompt: row for row in _rows(store, GroupRow)},
            samples={row.id: row for row in _rows(store, SampleRow)},
            trainings={(row.life, row.id): row for row in _rows(store, TrainingRow)},
        )
        if tokens:
            for row in _rows(store, TokensRow):
                books.tokens.setdefault(SampleId(row.prompt, row.attempt, row.number), []).append(row)
        _check(books)
    except (_Damaged, msgspec.DecodeError) as why:
        raise LedgerError(
            f"{store.name} is damaged ({why}); put a copy back, or begin a new run in another --output-dir"
        ) from None
    return books


class _Damaged(Exception):
    """The rows contradict one another."""


def _rows(store: Store, kind: type[R]) -> list[R]:
    return [row for row in store.rows(kind) if isinstance(row, kind)]


def _check(books: Books) -> None:
    if set(books.lives) != set(range(1, len(books.lives) + 1)):
        raise _Damaged(f"its lives are {sorted(books.lives)}")
    if len(books.groups) > books.run.num_drawn:
        raise _Damaged(f"{len(books.groups)} groups of {books.run.num_drawn} prompts")
    for id, sample in books.samples.items():
        if id.prompt not in books.groups:
            raise _Damaged(f"sample {id} has no group")
        if any(origin.life not in books.lives for origin in sample.origins):
            raise _Damaged(f"sample {id} belongs to a life that is not recorded")
    for training in books.trainings.values():
        if training.id not in books.samples:
            raise _Damaged(f"sample {training.id} was trained and is missing")
    for id, rows in books.tokens.items():
        _check_tokens(id, rows, books.samples[id].num_tokens if id in books.samples else 0)


def _check_tokens(id: SampleId, rows: Iterable[TokensRow], num_tokens: int) -> None:
    """Check that the rows are contiguous and hold as many tokens as the spans of the sample."""
    place = 0
    for row in rows:
        if row.start != place or len(row.ids) != len(row.logprobs) or len(row.ids) % _TOKEN_BYTES:
            raise _Damaged(f"the tokens of sample {id} do not follow one another")
        place += len(row.ids) // _TOKEN_BYTES
    if place != num_tokens:
        raise _Damaged(f"sample {id} has {place} tokens stored, and produced {num_tokens}")
