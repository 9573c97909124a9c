"""The end of a run whose reward function always fails."""

from tailrace.errors import RewardBroken, RewardFailed
from tailrace.reward.base import Rewards
from tailrace.types import Sample


class ConsecutiveFailures:
    """Counts failures without a success in between.

    Args:
        limit: the number of consecutive failures that ends the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._first = ""

    def succeeded(self) -> None:
        """Record a reward: the count starts again."""
        self._count = 0

    def failed(self, why: str) -> None:
        """Record a failure.

        Args:
            why: reason and traceback, for the error message.

        Raises:
            RewardBroken: the limit is reached; with the first failure's `why`.
        """
        if self._count == 0:
            self._first = why
        self._count += 1
        if self._count >= self._limit:
            raise RewardBroken(self._count, self._first)


class WithFailureLimit:
    """Rewards (reward/base.py) that end the run after too many consecutive failures.

    A timeout counts as a failure, also where it gives a reward of zero.
    """

    def __init__(self, rewards: Rewards, limit: int) -> None:
        self._rewards = rewards
        self._failures = ConsecutiveFailures(limit)

    async def score(self, sample: Sample) -> float:
        """As Rewards.score.

        Raises:
            RewardBroken: the limit is reached.
        """
        try:
            reward = await self._rewards.score(sample)
        except RewardFailed as failed:
            self._failures.failed(str(failed))
            raise
        if sample.timed_out:
            self._failures.failed("timeout: the reward function did not return in time")
        else:
            self._failures.succeeded()
        return reward
