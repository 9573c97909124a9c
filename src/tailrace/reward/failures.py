"""The end of a run whose reward function always fails."""

from tailrace.errors import RewardBroken, RewardFailed
from tailrace.reward.base import Rewards
from tailrace.types import Sample


class WithFailureLimit:
    """Rewards (reward/base.py) that end the run after too many failures without a success in between.

    A timeout counts as a failure, also where it gives a reward of zero.

    Args:
        limit: the number of consecutive failures that ends the run.
    """

    def __init__(self, rewards: Rewards, limit: int) -> None:
        self._rewards, self._limit = rewards, limit
        self._count, self._first = 0, ""
        """Failures since the last success; reason and traceback of the first of them."""

    async def score(self, sample: Sample) -> float:
        """As Rewards.score.

        Raises:
            RewardBroken: the limit is reached; with the first of the failures.
        """
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
