"""Simulated rewards: they take time on a bounded number of workers, and may fail or time out."""

import asyncio
import math
import random

from tailrace.errors import RewardFailed
from tailrace.reward.base import Rewards
from tailrace.reward.timeout import Anchors
from tailrace.sim.settings import SimCodeSettings, SimRewardSettings
from tailrace.types import Sample


def rewards_of(cost: SimRewardSettings, seed: int, anchors: Anchors) -> Rewards:
    """Return rewards that take virtual time.

    Args:
        anchors: what the rewards of programs learn of the time that correct ones take.
    """
    return SimCodeRewards(cost, cost.code, seed, anchors) if cost.code else SimRewards(cost, seed)


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
        return float(chance.random() < _solve_rate(self._cost, self._seed, sample))


class SimCodeRewards:
    """Programs whose test cases take virtual time, one worker each, as reward/code.py runs real ones with
    `score = "all"`."""

    def __init__(self, cost: SimRewardSettings, code: SimCodeSettings, seed: int, anchors: Anchors) -> None:
        self._cost, self._code, self._seed, self._anchors = cost, code, seed, anchors
        self._workers = asyncio.Semaphore(cost.workers)

    async def score(self, sample: Sample) -> float:
        code = self._code
        chance = random.Random(f"program {self._seed} {sample.id}")
        median_s = code.median_s * math.exp(code.sigma * self._of_prompt("case", sample).gauss(0, 1))
        times = [median_s * math.exp(code.own_sigma * chance.gauss(0, 1)) for _ in range(code.cases)]
        is_correct = chance.random() < _solve_rate(self._cost, self._seed, sample)
        if chance.random() < code.endless:
            is_correct, times[chance.randrange(code.cases)] = False, math.inf
        wrong = None if is_correct or math.inf in times else chance.randrange(code.cases)
        runs = [asyncio.create_task(self._run(sample, each)) for each in times]
        try:
            for number, run in enumerate(runs):
                if not await run:
                    sample.timed_out = True
                if sample.timed_out or number == wrong:
                    return 0.0
        finally:
            for run in runs:
                run.cancel()
        self._anchors.observe(sample, max(times))
        return 1.0

    async def _run(self, sample: Sample, seconds: float) -> bool:
        """Return whether a test case ends in time."""
        async with self._workers:
            limit_s = self._anchors.limit_s(sample, self._code.timeout)
            await asyncio.sleep(min(seconds, limit_s))
        return seconds <= limit_s

    def _of_prompt(self, what: str, sample: Sample) -> random.Random:
        row = sample.prompt.index if sample.prompt.row_number is None else sample.prompt.row_number
        return random.Random(f"{what} {self._seed} {row}")


def _solve_rate(cost: SimRewardSettings, seed: int, sample: Sample) -> float:
    return random.Random(f"rate {seed} {sample.prompt.index}").betavariate(*cost.solvable)
