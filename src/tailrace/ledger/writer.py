"""Commits cuts while the controller goes on: on a thread, or at once in virtual time."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tailrace.ledger.base import Cut, Store


class Writer(Protocol):
    """Commits cuts in order, one at a time."""

    def put(self, cut: Cut) -> asyncio.Future[None]:
        """Start a commit. The future is done when the cut is committed, or fails with the LedgerError of the
        store."""

    def close(self) -> None:
        """Wait for the commits that were started."""


class ThreadWriter:
    """Commits on a thread of its own, so that the controller does not wait for a disk or a network."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    def put(self, cut: Cut) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._store.commit, cut)

    def close(self) -> None:
        self._thread.shutdown()


class DirectWriter:
    """Commits at once, for virtual time, which has no threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, cut: Cut) -> asyncio.Future[None]:
        self._store.commit(cut)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Do nothing: all commits are done."""
