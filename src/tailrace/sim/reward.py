"""Simulated rewards: they take time on a bounded number of workers, and may fail or time out."""

import asyncio
import math
import random

from tailrace.errors import RewardFailed
from tailrace.sim.settings import SimRewardSettings
from tailrace.types import Sample


class SimRewards:
    """`Rewards` (reward/base.py) that take virtual time. Rewards are drawn from a seed."""

    def __init__(self, cost: SimRewardSettings, seed: int) -> None:
        self._cost, self._seed = cost, seed
        self._workers = asyncio.Semaphore(cost.workers)

    async def score(self, sample: Sample) -> float:
        chance = random.Random(f"reward {self._seed} {sample.id}")
        fault = chance.random()
        async with self._workers:
            try:
                async with asyncio.timeout(self._cost.timeout_s):
                    if fault < self._cost.hanging:
                        await asyncio.get_running_loop().create_future()
                    spread = math.exp(self._cost.sigma * chance.gauss(0, 1))
                    await asyncio.sleep(self._cost.median_s * spread)
            except TimeoutError:
                sample.timed_out = True
                return 0.0
        if fault < self._cost.hanging + self._cost.failing:
            raise RewardFailed("raised")
        rate = random.Random(f"rate {self._seed} {sample.prompt.index}").betavariate(*self._cost.solvable)
        return float(chance.random() < rate)
