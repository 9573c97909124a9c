"""Scoring: the reward of a sample, or the reason why it has none."""

import asyncio
from typing import Protocol

from tailrace.clock import Signal, now
from tailrace.errors import RewardFailed, ScheduleError
from tailrace.record.events import Recorder, SampleScored
from tailrace.reward.base import Rewards
from tailrace.types import Sample


class Service(Protocol):
    """What synchronous rewards read of the pool."""

    changed: Signal

    @property
    def is_endless(self) -> bool: ...

    @property
    def is_serving(self) -> bool: ...


class SynchronousRewards:
    """`Rewards` (reward/base.py) that wait until no request is served or waits: the baseline of RollPacker
    4.3."""

    def __init__(self, rewards: Rewards, service: Service) -> None:
        self._rewards, self._service = rewards, service
        self._one_waits = asyncio.Lock()

    async def score(self, sample: Sample) -> float:
        """As Rewards.score.

        Raises:
            ScheduleError: the schedule generates without a pause.
        """
        async with self._one_waits:  # each change of the pool wakes every task that waits for it
            while self._service.is_serving:
                if self._service.is_endless:
                    raise ScheduleError(
                        "it generates without a pause, so reward.synchronous = true cannot work"
                    )
                await self._service.changed.wait("the end of the rollout, to score it")
        return await self._rewards.score(sample)


async def score(sample: Sample, rewards: Rewards, recorder: Recorder) -> None:
    """Set the reward of a sample, or its failure."""
    detail = ""
    try:
        sample.reward = await rewards.score(sample)
    except RewardFailed as failed:
        sample.failure, detail = f"reward {failed.reason}", failed.detail
    failure = "reward timeout" if sample.timed_out else sample.failure
    recorder.emit(SampleScored(now(), sample.id, sample.reward, failure, sample.num_tokens, detail))
