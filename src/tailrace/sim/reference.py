"""A simulated reference model: time, and no log-probs."""

import asyncio

from tailrace.sim.settings import SimReferenceSettings
from tailrace.types import Sample


class SimReference:
    """Keeps the contract of `trainer.base.Reference`, made of time."""

    def __init__(self, cost: SimReferenceSettings) -> None:
        self._cost = cost
        self._device = asyncio.Lock()

    async def logprobs(self, sample: Sample) -> list[float]:
        """Empty: simulated samples have no tokens to have log-probs of."""
        async with self._device:
            await asyncio.sleep((len(sample.prompt.ids) + sample.num_tokens) / self._cost.tokens_per_s)
        return []
