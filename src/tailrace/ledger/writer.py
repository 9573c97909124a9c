"""Commits cuts on a thread, so that the controller does not wait for a disk or a network."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tailrace.ledger.base import Cut, Store


class Writer(Protocol):
    """Commits cuts in order, one at a time."""

    def put(self, cut: Cut) -> asyncio.Future[None]:
        """Start a commit. The future fails with the LedgerError of the store."""


class ThreadWriter:
    """A `Writer` with a thread of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    def put(self, cut: Cut) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._store.commit, cut)

    def close(self) -> None:
        """Wait for the commits that were started."""
        self._thread.shutdown()
