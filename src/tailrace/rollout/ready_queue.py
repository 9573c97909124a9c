"""ReadyQueue: a line of complete groups between two stages, with what happens when it is full.

Nothing leaves the line before all that a take wants is there, so cancelling a take loses no group.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from math import inf
from typing import Literal

from tailrace.clock import Signal
from tailrace.errors import NeverComes
from tailrace.rollout.selection import Select, earliest
from tailrace.types import Group

Full = Literal["hold", "drop"]
"""hold: whoever fills the ring looks at `is_full` first. drop: the oldest group is thrown out."""


class ReadyQueue:
    """Complete groups, in the order they came."""

    def __init__(self, name: str, *, drop: Callable[[Group, str], None], coming: Callable[[], float]) -> None:
        self.name = name
        self.room: float = inf
        self.full: Full = "hold"
        self.changed = Signal()
        self.on_taken: Callable[[], None] = lambda: None
        self._groups: dict[Group, None] = {}
        self._drop = drop
        self._coming = coming  # how many groups may still arrive

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        return list(self._groups)

    @property
    def is_full(self) -> bool:
        return self.full == "hold" and len(self) >= self.room

    def put(self, group: Group) -> None:
        self._groups[group] = None
        if self.full == "drop" and len(self) > self.room:
            oldest = next(iter(self._groups))
            del self._groups[oldest]
            self._drop(oldest, f"{self.name} overflow")
        self.changed.fire()

    def clear(self) -> list[Group]:
        """Take everything out."""
        groups, self._groups = self.groups, {}
        self.changed.fire()
        return groups

    async def take(self, n: int, select: Select = earliest) -> list[Group]:
        """n groups at once, as `select` chooses them.

        Raises:
            NeverComes: nothing that is in flight can complete the n.
        """
        return await self._some(n, n, select)

    async def stream(self, n: int, select: Select = earliest) -> AsyncIterator[list[Group]]:
        """n groups in all, as they come: each time every group that `select` lets out."""
        while n:
            self._expect(n)
            groups = await self._some(1, n, select)
            n -= len(groups)
            yield groups

    async def _some(self, least: int, most: int, select: Select) -> list[Group]:
        while True:
            if len(self) >= least and len(chosen := select(self._groups.keys(), most)) >= least:
                self._remove(chosen)
                return chosen
            self._expect(least)
            await self.changed.wait(f"{self.name}: {least} complete groups ({len(self)} there)")

    def _expect(self, n: int) -> None:
        if len(self) + self._coming() < n:
            raise NeverComes(
                f"{self.name}: {n} groups are wanted, {len(self)} are ready and {self._coming():.0f} in "
                "flight; launch as many groups as are taken"
            )

    def _remove(self, groups: Iterable[Group]) -> None:
        for group in groups:
            del self._groups[group]
        self.on_taken()
        self.changed.fire()
