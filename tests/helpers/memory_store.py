"""A store in memory, and commits without a thread: a run in virtual time can be killed and resumed."""

import asyncio
from typing import Any

from tailrace.ledger.base import Cut, R, Row, SampleRow, Store, TokensRow, TrainingRow


class MemoryStore:
    """Keeps the contract of `ledger.base.Store`."""

    def __init__(self) -> None:
        self.name = "memory"
        self._tables: dict[type[Row], dict[tuple[object, ...], Any]] = {}

    def commit(self, cut: Cut) -> None:
        for row in cut.rows:
            self._tables.setdefault(type(row), {})[row.key] = row
        pruned = set(cut.pruned)
        samples = self._tables.get(SampleRow, {})
        for training in self.rows(TrainingRow):
            if training.undone is None and training.step <= cut.covered_step:
                samples[training.id] = samples[training.id].without_tokens
                pruned.add(training.id)
        tokens = self._tables.get(TokensRow, {})
        for key in [key for key in tokens if key[:3] in pruned]:
            del tokens[key]

    def rows(self, kind: type[R]) -> list[R]:
        table = self._tables.get(kind, {})
        return [table[key] for key in sorted(table)]

    def close(self) -> None:
        """Do nothing: the rows stay for the next life."""


def commit_at_once(store: Store, cut: Cut) -> asyncio.Future[None]:
    """For virtual time, which has no threads."""
    store.commit(cut)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
