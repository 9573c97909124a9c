"""A simulated reference model: time, and no log-probs."""

import asyncio

from tailrace.sim.settings import SimReferenceSettings
from tailrace.types import Sample


class SimReference:
    """A `Reference` (trainer/base.py) that takes virtual time."""

    def __init__(self, cost: SimReferenceSettings) -> None:
        self._cost = cost
        self._device = asyncio.Lock()

    async def logprobs(self, sample: Sample) -> list[float]:
        """Empty: simulated samples have no token ids."""
        async with self._device:
            await asyncio.sleep(sample.num_sequence_tokens / self._cost.tokens_per_s)
        return []
