"""Policies: admission (which requests may be served now) and selection (which complete groups go to the
trainer). Pure functions, no I/O.

Admission: the pool asks about the first request of its queue. So admissions differ only in how many requests
they let in; rollout/order.py says which one is the first.

A selection gets the ready groups in the order in which they completed, and how many are wanted at most. It
returns the groups that go now; an empty list means: wait.

Bounded queues hold the stages between the engines and the trainer (PipelineRL 4). Groups leave the last one,
the ready queue, only when all groups that a take wants are there, so cancelling a take loses no group.
"""

import itertools
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from itertools import islice
from math import inf
from typing import Annotated, Literal, Protocol

from pydantic import Field
from typing_extensions import override

from tailrace.clock import Signal, now
from tailrace.errors import NeverComes
from tailrace.settings import Settings
from tailrace.types import Group, samples_of


class Service(Protocol):
    """The requests in service, as an admission reads them."""

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

    Only the `groups` groups launched first that still lack samples are served. All others wait. The
    printed width of U groups (5.1) leaves slots free: rounds get longer. See `Workload.frontier_width`.
    """

    kind: Literal["frontier"] = "frontier"
    groups: int = Field(ge=1)
    """Width of the frontier (F_w)."""

    def admits(self, group: Group, service: Service) -> bool:
        return service.serves(group) or service.num_groups < self.groups


class FrontierFirst(Settings):
    """Frontier-group dispatch in which later groups fill the slots that the frontier leaves free.

    As many requests are in service as `groups` whole groups have: a FIFO queue with a cap of groups * K.
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


def fits(max_tokens: int, replicas: int) -> Select:
    """The feasible batch (RolloutPipe 4): the largest prefix of whole groups within a token budget.

    A single group over the budget goes alone; the trainer splits it into micro-batches.
    """
    return lambda ready, wanted: next(feasible(islice(ready, wanted), max_tokens, replicas), [])


def feasible(groups: Iterable[Group], max_tokens: int, replicas: int) -> Iterator[list[Group]]:
    """Split groups, in order, into feasible batches: each replica of the trainer gets at most `max_tokens`
    tokens, prompts included. A group goes to the replica with the fewest. The paper packs groups before they
    wait for a step, which moves the borders of batches, and not those of steps."""
    batch: list[Group] = []
    shares = [0] * replicas
    for group in groups:
        size = trained_tokens(group)
        if batch and min(shares) + size > max_tokens:
            yield batch
            batch, shares = [], [0] * replicas
        batch.append(group)
        shares[shares.index(min(shares))] += size
    if batch:
        yield batch


def trained_tokens(group: Group) -> int:
    """Tokens of a group's trainable samples that a trainer computes, prompts and environment included."""
    return sum(sample.num_sequence_tokens for sample in samples_of([group]))


Full = Literal["block", "drop_oldest"]
"""Policies of a full stage. block: the producer checks `is_full` and waits. drop_oldest: the oldest group is
dropped and counted."""


class StageQueue:
    """The groups of one stage, in the order in which they came, at most `room` (PipelineRL 4: ring buffers).
    `drop` is called with a group that overflows and the reason."""

    def __init__(self, name: str, *, drop: Callable[[Group, str], None]) -> None:
        self.name, self._drop = name, drop
        self.room: float = inf
        self.full: Full = "block"
        self._groups: dict[Group, int | None] = {}  # each with its oldest version when it came
        self._most, self._blocked_s = 0, 0.0
        self._full_since_s: float | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group: Group) -> bool:
        return group in self._groups

    @property
    def groups(self) -> list[Group]:
        return list(self._groups)

    @property
    def is_full(self) -> bool:
        return self.full == "block" and len(self) >= self.room

    def put(self, group: Group) -> None:
        self._groups[group] = group.oldest_version
        if self.full == "drop_oldest" and len(self) > self.room:
            oldest = next(iter(self._groups))
            self.remove(oldest)
            self._drop(oldest, f"{self.name} overflow")
        self._measure()

    def remove(self, group: Group) -> None:
        """Remove a group, if it is here."""
        self._groups.pop(group, None)
        self._measure()

    def report(self) -> tuple[int, float]:
        """The most groups at a time, and the seconds for which the stage was full and took no group, both
        since the last report."""
        self._measure()
        report, self._most, self._blocked_s = (self._most, self._blocked_s), len(self), 0.0
        return report

    def _measure(self) -> None:
        self._most = max(self._most, len(self))
        if self._full_since_s is not None:
            self._blocked_s += now() - self._full_since_s
        self._full_since_s = now() if self.is_full else None


class ReadyQueue(StageQueue):
    """The stage of complete groups, from which the trainer takes. `coming`: how many may still arrive."""

    def __init__(self, name: str, *, drop: Callable[[Group, str], None], coming: Callable[[], float]) -> None:
        super().__init__(name, drop=drop)
        self.changed = Signal()
        self.on_taken: Callable[[Iterable[Group]], None] = lambda groups: None
        self.by_version: dict[int | None, dict[Group, int]] = {}
        """The groups by the oldest version that they had when they came, each with its number in the order of
        completion. A sample that has left a group may bring it an older version later."""
        self._numbers = itertools.count()
        self._coming = coming

    @override
    def put(self, group: Group) -> None:
        self.by_version.setdefault(group.oldest_version, {})[group] = next(self._numbers)
        super().put(group)
        self.changed.fire()

    @override
    def remove(self, group: Group) -> None:
        alike = self.by_version[version := self._groups[group]]
        del alike[group]
        if not alike:
            del self.by_version[version]
        super().remove(group)

    def clear(self) -> list[Group]:
        """Remove and return all groups."""
        groups = self.groups
        for group in groups:
            self.remove(group)
        self.changed.fire()
        return groups

    async def take(self, n: int, select: Select = earliest) -> list[Group]:
        """Wait for n groups, as `select` chooses them. Raises as `wait_for`."""
        return await self._take(n, n, select)

    async def stream(self, n: int, select: Select = earliest) -> AsyncIterator[list[Group]]:
        """n groups in all, as they come, each time all groups that `select` returns."""
        while n:
            self._check_can_come(n)
            groups = await self._take(1, n, select)
            n -= len(groups)
            yield groups

    async def wait_for(self, n: int) -> None:
        """Wait until n groups are here. They stay. Raises a NeverComes if fewer are ready or in flight."""
        while len(self) < n:
            await self._wait_for_more(n)

    async def _take(self, least: int, most: int, select: Select) -> list[Group]:
        while True:
            if len(self) >= least and len(chosen := select(self._groups.keys(), most)) >= least:
                self._hand_over(chosen)
                return chosen
            await self._wait_for_more(least)

    async def _wait_for_more(self, n: int) -> None:
        if n > self.room:
            raise NeverComes(f"the pool: {n} groups are wanted, and {self.room:.0f} have room; raise it")
        self._check_can_come(n)
        await self.changed.wait(f"the pool: {n} complete groups ({len(self)} there)")

    def _check_can_come(self, n: int) -> None:
        if len(self) + self._coming() < n:
            raise NeverComes(
                f"the pool: {n} groups are wanted, {len(self)} are ready and {self._coming():.0f} in "
                "flight; launch as many groups as are taken"
            )

    def _hand_over(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.remove(group)
        self.on_taken(groups)
        self.changed.fire()
