"""Ahead: the trainer has the next batch while it computes one, and need not wait in between."""

import asyncio
from collections.abc import Callable

from tailrace.types import Batch


class Ahead:
    """Trains batch after batch, in order."""

    def __init__(self, start: Callable[[Batch], asyncio.Task[None]]) -> None:
        self._start = start
        self._newest: asyncio.Task[None] | None = None

    async def train(self, batch: Batch) -> None:
        """Hand a batch over. Returns once all before it are trained: the next is to be found meanwhile."""
        before, self._newest = self._newest, self._start(batch)
        if before is not None:
            await before

    async def trained(self) -> None:
        """Wait until all that was handed over is trained."""
        if self._newest is not None:
            await self._newest
