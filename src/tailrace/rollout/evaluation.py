"""Evaluation: held-out prompts through the same engines and rewards, outside the pool and the ledger."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.clock import waiting
from tailrace.data.base import Prompts
from tailrace.errors import BadRow, RewardFailed
from tailrace.record.events import EvaluatedSample
from tailrace.reward.base import Rewards
from tailrace.rollout.router import Router
from tailrace.types import Group, Sample, SampleId, noise_seed


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    accuracy: float
    """Mean reward; a sample that could not be rewarded counts 0."""
    num_tokens: int
    samples: tuple[EvaluatedSample, ...]


def held_out_samples(
    prompts: Prompts, n: int, seed: int, attempt: int, *, greedy: bool = False
) -> list[Sample]:
    """One sample of each of the first n usable prompts. Prompt indices are below zero: training uses the
    others.

    Args:
        attempt: number of the evaluation; another one has other sampling noise.
        greedy: the engine takes the most likely token at each position.
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
        group.samples = [Sample(id, group, seed=noise_seed(seed, id), greedy=greedy)]
        samples += group.samples
    return samples


async def evaluate(samples: Sequence[Sample], router: Router, rewards: Rewards) -> Evaluation:
    """Generate and score all samples."""
    # Of all engines: those that are away now may come back while it runs.
    slots = asyncio.Semaphore(sum(engine.slots for engine in router.engines))

    async def score(sample: Sample) -> EvaluatedSample:
        async with slots:
            await router.serve(sample)
        try:
            return EvaluatedSample.of(sample, await rewards.score(sample))
        except RewardFailed as failed:
            return EvaluatedSample.of(sample, 0.0, f"reward {failed.reason}")

    with waiting(f"{len(samples)} held-out samples"):
        scored = await asyncio.gather(*(score(sample) for sample in samples))
    accuracy = sum(sample.reward for sample in scored) / len(scored)
    return Evaluation(accuracy, sum(sample.num_tokens for sample in samples), tuple(scored))
