"""Simulated rewards: they take time on a bounded number of workers, and may fail or time out."""

import asyncio
import math
import random
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from typing import Protocol

from tailrace.contracts.reward import Rewards
from tailrace.errors import RewardFailed
from tailrace.rollout.reward_timeout import Anchors
from tailrace.sim.host import Host
from tailrace.sim.settings import SimCodeSettings, SimRewardSettings
from tailrace.sim.world import MANY_PROMPTS, Chance, row_of
from tailrace.types import Sample

REWARD, PROGRAM, CASE, RATE = 3, 4, 5, 6
"""Keys of random streams; world.py has the others."""


class SharedJudge(Protocol):
    """A judge on a device of the engines, in virtual time."""

    @property
    def num_waiting(self) -> int:
        """Texts that have no score yet."""

    async def score(self, num_tokens: int) -> None:
        """Take the time to score a sequence of so many tokens."""


def rewards_of(
    cost: SimRewardSettings,
    seed: int,
    anchors: Anchors,
    host: Host | None = None,
    judges: Sequence[SharedJudge] = (),
) -> Rewards:
    """Return rewards that take virtual time.

    Args:
        host: which the rewards of a judge slow down.
        judges: one on each device of the engines.
    """
    if judges:
        return SimJudgedRewards(cost, judges, seed)
    return SimCodeRewards(cost, cost.code, seed, anchors) if cost.code else SimRewards(cost, seed, host)


class SimRewards:
    """`Rewards` drawn from a seed, on a bounded number of workers."""

    def __init__(self, cost: SimRewardSettings, seed: int, host: Host | None = None) -> None:
        self._cost, self._seed = cost, seed
        self._judging = partial(host.working, "judge") if host else nullcontext
        self._workers = asyncio.Semaphore(cost.workers)

    async def score(self, sample: Sample) -> float:
        cost, chance = self._cost, Chance(REWARD, self._seed, *sample.id)
        fault = chance.uniform()
        seconds = cost.median_s * math.exp(cost.sigma * chance.normal())
        if fault < cost.hanging:
            seconds = math.inf
        async with self._workers:
            with self._judging():
                await asyncio.sleep(min(seconds, cost.timeout_s))
        if seconds >= cost.timeout_s:
            sample.timed_out = True
            return 0.0
        if fault < cost.hanging + cost.failing:
            raise RewardFailed("raised")
        return float(chance.uniform() < _solve_rate(cost.solvable, self._seed, row_of(sample.prompt)))


class SimJudgedRewards:
    """`Rewards` of one judge on each device of the engines. A text goes to the shortest queue."""

    def __init__(self, cost: SimRewardSettings, judges: Sequence[SharedJudge], seed: int) -> None:
        self._cost, self._judges, self._seed = cost, judges, seed

    async def score(self, sample: Sample) -> float:
        await min(self._judges, key=lambda judge: judge.num_waiting).score(sample.num_sequence_tokens)
        chance = Chance(REWARD, self._seed, *sample.id)
        return float(chance.uniform() < _solve_rate(self._cost.solvable, self._seed, row_of(sample.prompt)))


class SimCodeRewards:
    """Programs whose test cases take virtual time, one worker each, as extras/sandbox/code.py runs real ones
    with `score = "all"`."""

    def __init__(self, cost: SimRewardSettings, code: SimCodeSettings, seed: int, anchors: Anchors) -> None:
        self._cost, self._code, self._seed, self._anchors = cost, code, seed, anchors
        self._workers = asyncio.Semaphore(cost.workers)

    async def score(self, sample: Sample) -> float:
        code = self._code
        chance = Chance(PROGRAM, self._seed, *sample.id)
        of_cases = Chance(CASE, self._seed, row_of(sample.prompt))
        median_s = code.median_s * math.exp(code.sigma * of_cases.normal())
        medians_s = [median_s * math.exp(code.case_sigma * of_cases.normal()) for _ in range(code.cases)]
        times = [each_s * math.exp(code.own_sigma * chance.normal()) for each_s in medians_s]
        is_correct = chance.uniform() < _solve_rate(self._cost.solvable, self._seed, row_of(sample.prompt))
        if chance.uniform() < code.endless:
            is_correct, times[chance.below(code.cases)] = False, math.inf
        wrong = None if is_correct or math.inf in times else chance.below(code.cases)
        reference_s = max(medians_s) if code.timeout.reference_column else None
        runs = [asyncio.create_task(self._run(sample, *each, reference_s)) for each in enumerate(times)]
        try:
            for number, run in enumerate(runs):
                if not await run:
                    sample.timed_out = True
                if sample.timed_out or number == wrong:
                    return 0.0
        finally:
            for run in runs:
                run.cancel()
        self._anchors.observe(sample, times)
        return 1.0

    async def _run(self, sample: Sample, case: int, seconds: float, reference_s: float | None) -> bool:
        """Whether a test case ends in time."""
        async with self._workers:
            limited = self._anchors.limit(sample, case, self._code.timeout, reference_s)
            with limited as limit, suppress(TimeoutError):
                async with limit.enforced():
                    await asyncio.sleep(min(seconds, limit.seconds))
        return seconds <= limit.seconds


@lru_cache(MANY_PROMPTS)
def _solve_rate(solvable: tuple[float, float], seed: int, row: int) -> float:
    return random.Random(Chance(RATE, seed, row).bits()).betavariate(*solvable)
