"""ReadyQueue: complete groups on their way to the trainer (PipelineRL 4: the ring buffer between two stages).

Groups leave the queue only when all groups that a take wants are there, so cancelling a take loses no group.
"""

import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from math import inf
from typing import Literal

from tailrace.clock import Signal
from tailrace.errors import NeverComes
from tailrace.rollout.selection import Select, earliest
from tailrace.types import Group

Full = Literal["block", "drop_oldest"]
"""What happens when the queue is full. block: the producer checks `is_full` and waits. drop_oldest: the
oldest group is dropped and counted."""


class ReadyQueue:
    """Complete groups, in the order in which they completed.

    Args:
        name: for error messages.
        drop: called with a group that overflows, and the reason.
        coming: how many groups may still arrive.
    """

    def __init__(self, name: str, *, drop: Callable[[Group, str], None], coming: Callable[[], float]) -> None:
        self.name = name
        self.room: float = inf
        self.full: Full = "block"
        self.changed = Signal()
        self.on_taken: Callable[[Iterable[Group]], None] = lambda groups: None
        self.by_version: dict[int | None, dict[Group, int]] = {}
        """The groups by the oldest version that they had when they came, each with its number in the order of
        completion. A sample that has left a group may bring it an older version later."""
        self._groups: dict[Group, int | None] = {}  # each with its version in by_version
        self._numbers = itertools.count()
        self._drop = drop
        self._coming = coming

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        return list(self._groups)

    @property
    def is_full(self) -> bool:
        return self.full == "block" and len(self) >= self.room

    def put(self, group: Group) -> None:
        self._groups[group] = version = group.oldest_version
        self.by_version.setdefault(version, {})[group] = next(self._numbers)
        if self.full == "drop_oldest" and len(self) > self.room:
            oldest = next(iter(self._groups))
            self._forget(oldest)
            self._drop(oldest, f"{self.name} overflow")
        self.changed.fire()

    def clear(self) -> list[Group]:
        """Remove and return all groups."""
        groups, self._groups, self.by_version = self.groups, {}, {}
        self.changed.fire()
        return groups

    async def take(self, n: int, select: Select = earliest) -> list[Group]:
        """Wait for n groups, as `select` chooses them.

        Raises:
            NeverComes: fewer than n groups are ready or in flight.
        """
        return await self._some(n, n, select)

    async def stream(self, n: int, select: Select = earliest) -> AsyncIterator[list[Group]]:
        """n groups in all, as they come, each time all groups that `select` returns."""
        while n:
            self._expect(n)
            groups = await self._some(1, n, select)
            n -= len(groups)
            yield groups

    async def wait_for(self, n: int) -> None:
        """Wait until n groups are here. They stay.

        Raises:
            NeverComes: fewer than n groups are ready or in flight.
        """
        while len(self) < n:
            await self._more(n)

    async def _some(self, least: int, most: int, select: Select) -> list[Group]:
        while True:
            if len(self) >= least and len(chosen := select(self._groups.keys(), most)) >= least:
                self._remove(chosen)
                return chosen
            await self._more(least)

    async def _more(self, n: int) -> None:
        self._expect(n)
        await self.changed.wait(f"{self.name}: {n} complete groups ({len(self)} there)")

    def _expect(self, n: int) -> None:
        if len(self) + self._coming() < n:
            raise NeverComes(
                f"{self.name}: {n} groups are wanted, {len(self)} are ready and {self._coming():.0f} in "
                "flight; launch as many groups as are taken"
            )

    def _remove(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._forget(group)
        self.on_taken(groups)
        self.changed.fire()

    def _forget(self, group: Group) -> None:
        version = self._groups.pop(group)
        alike = self.by_version[version]
        del alike[group]
        if not alike:
            del self.by_version[version]
