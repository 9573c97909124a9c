"""Who commits a cut while the controller goes on: a thread, or in virtual time nobody."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tailrace.ledger.base import Cut, Store


class Writer(Protocol):
    """Commits cuts, each when the one before it is done."""

    def put(self, cut: Cut) -> asyncio.Future[None]:
        """Done when the cut is committed; fails with the store's LedgerError."""

    def close(self) -> None:
        """Wait for what was put."""


class ThreadWriter:
    """Commits on a thread of its own: the controller waits for no disk and no network."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    def put(self, cut: Cut) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._store.commit, cut)

    def close(self) -> None:
        self._thread.shutdown()


class DirectWriter:
    """Commits at once: virtual time has no threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, cut: Cut) -> asyncio.Future[None]:
        self._store.commit(cut)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Nothing waits."""
