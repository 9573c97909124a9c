"""Reads all rows of a store and checks that they are consistent."""

from collections.abc import Iterator

import msgspec

from tailrace.errors import LedgerError
from tailrace.ledger.base import (
    FORMAT,
    Books,
    GroupRow,
    LifeRow,
    MarkRow,
    RunRow,
    SampleRow,
    Store,
    TokensRow,
    TrainingRow,
)
from tailrace.types import SampleId

_TOKEN_BYTES = 4


def read_books(store: Store, *, tokens: bool = True) -> Books:
    """Read the books of a run.

    Args:
        tokens: whether to read the tokens of the samples, which are most of the data.

    Raises:
        LedgerError: the store is damaged, or of another format.
    """
    runs = store.rows(RunRow)
    if len(runs) != 1 or runs[0].format != FORMAT:
        raise LedgerError(
            f"{store.name} holds no ledger that this version of tailrace reads (format {FORMAT}); resume "
            "with the version that wrote it, or begin a new run in another --output-dir"
        )
    books = Books(
        run=runs[0],
        lives={row.life: row for row in store.rows(LifeRow)},
        marks=store.rows(MarkRow),
        groups={row.prompt: row for row in store.rows(GroupRow)},
        samples={row.id: row for row in store.rows(SampleRow)},
        trainings={(row.life, row.id): row for row in store.rows(TrainingRow)},
    )
    for row in store.rows(TokensRow) if tokens else ():
        books.tokens.setdefault(SampleId(row.prompt, row.attempt, row.number), []).append(row)
    try:
        problem = next(_contradictions(books), None)
    except msgspec.DecodeError as why:
        problem = str(why)
    if problem:
        raise LedgerError(
            f"{store.name} is damaged ({problem}); put a copy back, or begin a new run in another "
            "--output-dir"
        )
    return books


def _contradictions(books: Books) -> Iterator[str]:
    """Yield what is wrong where the rows contradict one another."""
    if set(books.lives) != set(range(1, len(books.lives) + 1)):
        yield f"its lives are {sorted(books.lives)}"
    if len(books.groups) > books.run.num_drawn:
        yield f"{len(books.groups)} groups of {books.run.num_drawn} prompts"
    for id, sample in books.samples.items():
        if id.prompt not in books.groups:
            yield f"sample {id} has no group"
        if any(origin.life not in books.lives for origin in sample.origins):
            yield f"sample {id} belongs to a life that is not recorded"
        ends = [turn.num_tokens for turn in sample.ended_turns]
        if ends != sorted(ends) or max(ends, default=0) > sample.num_tokens:
            yield f"the turns of sample {id} end at {ends} of {sample.num_tokens} tokens"
    for training in books.trainings.values():
        if training.id not in books.samples:
            yield f"sample {training.id} was trained and is missing"
    for id, rows in books.tokens.items():
        num_stored = 0
        for row in rows:
            if row.start != num_stored or len(row.ids) != len(row.logprobs) or len(row.ids) % _TOKEN_BYTES:
                yield f"the tokens of sample {id} do not follow one another"
            num_stored += len(row.ids) // _TOKEN_BYTES
        num_tokens = books.samples[id].num_tokens if id in books.samples else 0
        if num_stored != num_tokens:
            yield f"sample {id} has {num_stored} tokens stored, and produced {num_tokens}"
