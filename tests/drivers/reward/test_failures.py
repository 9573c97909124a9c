"""A reward function that always fails ends the run; one that fails at times does not."""

import asyncio
from collections.abc import Sequence

import pytest

from tailrace.errors import RewardBroken, RewardFailed
from tailrace.rollout.rewards import WithFailureLimit
from tailrace.types import Group, Prompt, Sample, SampleId


class Scripted:
    """Rewards in a given order: a number, "timeout", or the reason of a failure."""

    def __init__(self, outcomes: Sequence[float | str]) -> None:
        self._outcomes = iter(outcomes)

    async def score(self, sample: Sample) -> float:
        outcome = next(self._outcomes)
        if outcome == "timeout":
            sample.timed_out = True
            return 0.0
        if isinstance(outcome, str):
            raise RewardFailed("raised", outcome)
        return outcome


def scores(outcomes: Sequence[float | str], limit: int) -> list[float | str]:
    """What each sample gets: its reward, or the reason of its failure."""

    async def main() -> list[float | str]:
        rewards = WithFailureLimit(Scripted(outcomes), limit)
        found: list[float | str] = []
        for number in range(len(outcomes)):
            group = Group(Prompt(0, []), 1, [])
            try:
                found.append(await rewards.score(Sample(SampleId(0, 0, number), group)))
            except RewardFailed as failed:
                found.append(failed.reason)
        return found

    return asyncio.run(main())


def test_failures_with_a_reward_in_between_are_data() -> None:
    assert scores(["a", "b", 1.0, "c", "d", 0.5], limit=3) == [
        "raised",
        "raised",
        1.0,
        "raised",
        "raised",
        0.5,
    ]


def test_consecutive_failures_end_the_run_with_the_first_traceback() -> None:
    with pytest.raises(RewardBroken) as broken:
        scores([1.0, "first traceback", "second", "third", 1.0], limit=3)
    assert str(broken.value) == (
        "the last 3 samples in sequence could not be rewarded (reward.max_failures); "
        "the first failure: raised: first traceback"
    )


def test_timeouts_with_a_reward_of_zero_count_as_failures() -> None:
    assert scores(["timeout", "a"], limit=3) == [0.0, "raised"]
    with pytest.raises(RewardBroken, match="the first failure: timeout"):
        scores(["timeout", "a", "timeout"], limit=3)


def test_a_limit_of_one_ends_the_run_at_once() -> None:
    with pytest.raises(RewardBroken, match="the last 1 samples in sequence"):
        scores([1.0, "raised"], limit=1)
