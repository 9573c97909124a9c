"""The reference stage: log-probs of finished samples under the reference model, beside their rewards."""

import asyncio
import math

from tailrace.errors import RewardFailed
from tailrace.reward.base import Rewards
from tailrace.trainer.base import Reference
from tailrace.types import Sample


class WithReference:
    """`Rewards` (reward/base.py) that also set `Sample.reference_logprobs`.

    Reward and log-probs are computed as soon as a sample is finished, at the same time, beside the rollout
    and the training. A sample is scored when both are there.
    """

    def __init__(self, rewards: Rewards, reference: Reference) -> None:
        self._rewards, self._reference = rewards, reference

    async def score(self, sample: Sample) -> float:
        """As Rewards.score.

        Raises:
            RewardFailed: also, reason "without reference": a log-prob under the reference is not finite.
        """
        reward, logprobs = await asyncio.gather(self._rewards.score(sample), self._reference.logprobs(sample))
        if not all(map(math.isfinite, logprobs)):
            raise RewardFailed("without reference", "a log-prob under the reference model is not finite")
        sample.reference_logprobs = logprobs
        return reward
