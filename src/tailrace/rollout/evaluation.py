"""Evaluation: held-out prompts through the same engines and rewards, outside the pool and the ledger."""

import asyncio
from collections.abc import Sequence

from tailrace.errors import RewardFailed
from tailrace.reward.base import Rewards
from tailrace.rollout.fleet import Fleet
from tailrace.types import Sample


async def evaluate(samples: Sequence[Sample], fleet: Fleet, rewards: Rewards) -> list[float]:
    """The reward of each sample once generated; a sample that cannot be rewarded counts 0."""
    slots = asyncio.Semaphore(fleet.slots)

    async def one(sample: Sample) -> float:
        async with slots:
            await fleet.serve(sample)
        try:
            return await rewards.score(sample)
        except RewardFailed:
            return 0.0

    return await asyncio.gather(*(one(sample) for sample in samples))
