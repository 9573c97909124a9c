"""Publication of weights: one version on its way from the trainer to the engines."""

import asyncio
from collections.abc import Sequence

from tailrace.engine.base import Engine
from tailrace.types import KV, Group
from tailrace.weights.base import Weights


class WeightUpdate:
    """Loads one version into every engine, between two decode steps.

    Args:
        tasks: the loads run in this task group.
        kv: whether engines keep or recompute the KV cache of requests in flight.
        in_flight: the groups that engines may be working on.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        engines: Sequence[Engine],
        weights: Weights,
        kv: KV,
        in_flight: Sequence[Group],
    ) -> None:
        self._loads = [tasks.create_task(engine.load(weights, kv=kv)) for engine in engines]
        self._without_tokens = {group for group in in_flight if group.oldest_version is None}

    def may_start_older(self, group: Group) -> bool:
        """Whether the first token of a group may be of the version before.

        An engine reports the tokens of the old weights when the new weights arrive. Until then a group
        without reported tokens may have some of the old version.
        """
        return group in self._without_tokens and not all(load.done() for load in self._loads)

    async def arrived(self) -> None:
        """Wait until every engine has loaded the version."""
        if self._loads:
            await asyncio.wait(self._loads)
