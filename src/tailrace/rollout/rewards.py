"""The chain of rewards of a run, live or in virtual time: what stands around the scorers."""

import asyncio
import math

from tailrace.clock import now
from tailrace.contracts.reward import Rewards
from tailrace.contracts.trainer import Reference
from tailrace.errors import RewardBroken, RewardFailed, ScheduleError
from tailrace.record.events import Recorder, ReferenceScored
from tailrace.rollout.pool import Pool
from tailrace.types import Sample


def chain_of_rewards(
    scorers: Rewards,
    *,
    max_failures: int | None,
    reference: Reference | None = None,
    recorder: Recorder | None = None,
) -> Rewards:
    """Return the rewards of a run.

    Args:
        scorers: reward functions, programs in place of them and judges beside them, or simulated ones.
        max_failures: failures in sequence that end the run. None: there is no limit.
        reference: sets log-probs of each sample, too.
        recorder: is told when.
    """
    rewards = scorers if reference is None else WithReference(scorers, reference, recorder)
    return rewards if max_failures is None else WithFailureLimit(rewards, max_failures)


class WithFailureLimit:
    """`Rewards` that end the run after `limit` failures without a success in between. A timeout counts as a
    failure, also where it gives a reward of zero."""

    def __init__(self, rewards: Rewards, limit: int) -> None:
        self._rewards, self._limit = rewards, limit
        self._count, self._first = 0, ""
        """Failures since the last success; reason and traceback of the first of them."""

    async def score(self, sample: Sample) -> float:
        """Score a sample. Raises a RewardBroken with the first failures if the limit is reached."""
        try:
            reward = await self._rewards.score(sample)
        except RewardFailed as failed:
            self._failed(str(failed))
            raise
        if sample.timed_out:
            self._failed("timeout: the reward function did not return in time")
        else:
            self._count = 0
        return reward

    def _failed(self, why: str) -> None:
        self._first = self._first if self._count else why
        self._count += 1
        if self._count >= self._limit:
            raise RewardBroken(self._count, self._first)


class WithReference:
    """`Rewards` (contracts/reward.py) that also set `Sample.reference_logprobs`. Both are computed at the
    same time, as soon as a sample is finished."""

    def __init__(self, rewards: Rewards, reference: Reference, recorder: Recorder | None = None) -> None:
        self._rewards, self._reference, self._recorder = rewards, reference, recorder

    async def score(self, sample: Sample) -> float:
        """Score as `Rewards.score`. A reference log-prob that is not finite is a RewardFailed, too."""
        reward, logprobs = await asyncio.gather(self._rewards.score(sample), self._logprobs(sample))
        if not all(map(math.isfinite, logprobs)):
            raise RewardFailed("without reference", "a log-prob under the reference model is not finite")
        sample.reference_logprobs = logprobs
        return reward

    async def _logprobs(self, sample: Sample) -> list[float]:
        begun_s = now()
        logprobs = await self._reference.logprobs(sample)
        if self._recorder:
            self._recorder.emit(ReferenceScored(begun_s, now(), sample.id, sample.num_tokens))
        return logprobs


class SynchronousRewards:
    """`Rewards` (contracts/reward.py) that wait until no request is served or waits: the baseline of
    RollPacker 4.3."""

    def __init__(self, rewards: Rewards, pool: Pool) -> None:
        self._rewards, self._pool = rewards, pool
        self._one_waits = asyncio.Lock()

    async def score(self, sample: Sample) -> float:
        """Score as `Rewards.score`. A schedule that generates without a pause is a ScheduleError."""
        async with self._one_waits:  # each change of the pool wakes every task that waits for it
            while self._pool.is_serving:
                if self._pool.is_endless:
                    raise ScheduleError(
                        "it generates without a pause, so reward.synchronous = true cannot work"
                    )
                await self._pool.changed.wait("the end of the rollout, to score it")
        return await self._rewards.score(sample)
