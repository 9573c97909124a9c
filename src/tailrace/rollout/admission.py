"""Which requests may be served now, and which complete groups go to the trainer. Pure functions, no I/O.

Admission: the pool asks about the first request of its queue. The queue is in the order of launch, unless a
schedule sets another (`Pool.order`). So admissions differ only in how many requests they let in.

A selection gets the ready groups in the order in which they completed, and how many are wanted at most. It
returns the groups that go now; an empty list means: wait.

The ready queue holds complete groups on their way to the trainer (PipelineRL 4: the ring buffer between two
stages). Groups leave the queue only when all groups that a take wants are there, so cancelling a take loses
no group.
"""

import itertools
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from itertools import islice
from math import inf
from typing import Annotated, Literal, Protocol

from pydantic import Field

from tailrace.clock import Signal
from tailrace.errors import NeverComes
from tailrace.settings import Settings
from tailrace.types import Group, samples_of


class Service(Protocol):
    """What an admission may read: the requests in service."""

    @property
    def num_requests(self) -> int:
        """Requests on engines."""

    @property
    def num_engines(self) -> int:
        """Engines that are open."""

    @property
    def num_groups(self) -> int:
        """Groups in service that lack samples: the frontier (RolloutPipe 3.3)."""

    def serves(self, group: Group) -> bool:
        """Whether the group is in the frontier."""


class AtMost(Settings):
    """FIFO admission with an optional cap on the requests in service."""

    kind: Literal["at_most"] = "at_most"
    requests_per_engine: int | None = Field(default=None, ge=1)
    """Requests in service, for each open engine (PipelineRL's H). None: as many as engines have slots."""

    def admits(self, group: Group, service: Service) -> bool:
        cap = self.requests_per_engine
        return cap is None or service.num_requests < cap * service.num_engines


class Frontier(Settings):
    """Frontier-group dispatch as printed (RolloutPipe eq. 5 and 6).

    Only the `groups` groups launched first that still lack samples are served. All other requests wait.
    """

    kind: Literal["frontier"] = "frontier"
    groups: int = Field(ge=1)
    """Width of the frontier (F_w)."""

    def admits(self, group: Group, service: Service) -> bool:
        return service.serves(group) or service.num_groups < self.groups


class FrontierFirst(Settings):
    """Frontier-group dispatch in which later groups fill the slots that the frontier leaves free.

    As many requests are in service as `groups` whole groups have. Because the queue is in the order of
    launch, this admits the same requests as a FIFO queue with a cap of groups * K requests in all; the cap is
    only given in another unit.
    """

    kind: Literal["frontier_first"] = "frontier_first"
    groups: int = Field(ge=1)
    """Width of the frontier (F_w)."""

    def admits(self, group: Group, service: Service) -> bool:
        return service.num_requests < self.groups * group.num_launched


FIFO = AtMost()
Admission = Annotated[AtMost | Frontier | FrontierFirst, Field(discriminator="kind")]


Select = Callable[[Collection[Group], int], list[Group]]


def earliest(ready: Collection[Group], wanted: int) -> list[Group]:
    """The groups that completed first (the trainer's FIFO, RolloutPipe 3.2)."""
    return list(islice(ready, wanted))


def fits(max_tokens: int) -> Select:
    """The feasible batch (RolloutPipe 4): the largest prefix of whole groups within a token budget.

    A single group over the budget goes alone; the trainer splits it into micro-batches.
    """

    def feasible_batch(ready: Collection[Group], wanted: int) -> list[Group]:
        return next(feasible(islice(ready, wanted), max_tokens), [])

    return feasible_batch


def feasible(groups: Iterable[Group], max_tokens: int) -> Iterator[list[Group]]:
    """Split groups, in order, into feasible batches of at most `max_tokens` tokens, prompts included."""
    batch: list[Group] = []
    total = 0
    for group in groups:
        size = trained_tokens(group)
        if batch and total + size > max_tokens:
            yield batch
            batch, total = [], 0
        batch.append(group)
        total += size
    if batch:
        yield batch


def trained_tokens(group: Group) -> int:
    """Tokens that a trainer computes for a group: its trainable samples, prompts and the environment's tokens
    included."""
    return sum(sample.num_sequence_tokens for sample in samples_of([group]))


Full = Literal["block", "drop_oldest"]
"""What happens when the queue is full. block: the producer checks `is_full` and waits. drop_oldest: the
oldest group is dropped and counted."""


class ReadyQueue:
    """Complete groups, in the order in which they completed. `drop` is called with a group that overflows
    and the reason; `coming` returns how many groups may still arrive."""

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
        """Wait for n groups, as `select` chooses them. Raises as `wait_for`."""
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
