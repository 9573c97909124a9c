"""A store in memory, and commits without a thread: a run in virtual time can be killed and resumed."""

import asyncio
from pathlib import Path

from tailrace.ledger.base import Transaction
from tailrace.ledger.store import Store


class MemoryStore(Store):
    """Lives as long as the object: the next life reads it."""

    def __init__(self) -> None:
        created = Store.create(Path(":memory:"))
        super().__init__(Path("memory"), created._connection)

    def __del__(self) -> None:
        self.close()


def commit_at_once(store: Store, transaction: Transaction) -> asyncio.Future[None]:
    """For virtual time, which has no threads."""
    store.commit(transaction)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
