"""Evaluation: held-out prompts through the same engines and rewards, outside the pool and the ledger."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.clock import waiting
from tailrace.data.base import Prompts
from tailrace.errors import BadRow, RewardFailed
from tailrace.reward.base import Rewards
from tailrace.rollout.router import Router
from tailrace.types import Group, Sample, SampleId, noise_seed


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    accuracy: float
    """Mean reward; a sample that could not be rewarded counts 0."""
    num_tokens: int


def held_out_samples(prompts: Prompts, n: int, seed: int, attempt: int) -> list[Sample]:
    """One sample of each of the first n usable prompts.

    Their ids are below zero, never a training prompt's; another attempt has other noise.
    """
    samples: list[Sample] = []
    index = 0
    while len(samples) < n:
        try:
            group = Group(prompts[index], 1, [], num_launched=1)
        except BadRow:
            continue
        finally:
            index += 1
        id = SampleId(-index, attempt, 0)
        group.samples = [Sample(id, group, seed=noise_seed(seed, id))]
        samples += group.samples
    return samples


async def evaluate(samples: Sequence[Sample], router: Router, rewards: Rewards) -> Evaluation:
    """Generate and score all samples."""
    # Of all engines: those that are away now may come back while it runs.
    slots = asyncio.Semaphore(sum(engine.slots for engine in router.engines))

    async def reward_of(sample: Sample) -> float:
        async with slots:
            await router.serve(sample)
        try:
            return await rewards.score(sample)
        except RewardFailed:
            return 0.0

    with waiting(f"{len(samples)} held-out samples"):
        scores = await asyncio.gather(*(reward_of(sample) for sample in samples))
    return Evaluation(sum(scores) / len(scores), sum(sample.num_tokens for sample in samples))
