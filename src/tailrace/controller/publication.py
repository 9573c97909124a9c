"""WeightUpdate: published weights on their way to the engines."""

import asyncio
from collections.abc import Sequence

from tailrace.engine.base import Engine
from tailrace.types import KV, Group
from tailrace.weights.base import Weights


class WeightUpdate:
    """One publication, until every open engine has it."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        engines: Sequence[Engine],
        weights: Weights,
        kv: KV,
        living: Sequence[Group],
    ) -> None:
        """living: the groups that engines may be working on."""
        self._loads = [tasks.create_task(engine.load(weights, kv=kv)) for engine in engines if engine.open]
        self._unborn = {group for group in living if group.oldest_version is None}

    def awaits(self, group: Group) -> bool:
        """Whether its first token may be one of the version before, or be one and not be known yet: an engine
        reports what the old weights produced when the new ones arrive."""
        return group in self._unborn and not all(load.done() for load in self._loads)

    async def ended(self) -> None:
        """Wait until they are there."""
        if self._loads:
            await asyncio.wait(self._loads)
