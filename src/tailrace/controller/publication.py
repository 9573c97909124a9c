"""Publication of weights: one version on its way from the trainer to the engines."""

import asyncio
from collections.abc import Sequence

from tailrace.engine.base import Engine
from tailrace.rollout.ages import Ages
from tailrace.types import KV
from tailrace.weights.base import Weights


class WeightUpdate:
    """Loads one version into every engine, between two decode steps.

    Args:
        tasks: the loads run in this task group.
        kv: whether engines keep or recompute the KV cache of requests in flight.
        ages: of the groups that engines may be working on.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        engines: Sequence[Engine],
        weights: Weights,
        kv: KV,
        ages: Ages,
    ) -> None:
        self._loads = [tasks.create_task(engine.load(weights, kv=kv)) for engine in engines]
        ages.published(lambda: all(load.done() for load in self._loads))

    async def arrived(self) -> None:
        """Wait until every engine has loaded the version."""
        if self._loads:
            await asyncio.wait(self._loads)
