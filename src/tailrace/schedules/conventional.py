"""Conventional RL, as PipelineRL (Piche et al. 2025) defines it: section 2.2, Algorithm 1.

    generation   B * G sequences with the round's weights, shuffled, split into G batches of B
    training     G optimizer steps, each one step more off-policy than the one before

Its maximum lag is G - 1 optimizer steps. To compare it with a PipelineRL of maximum lag g_max, choose
G = g_max + 1.
"""

from math import ceil

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count
from tailrace.types import batched


async def conventional(run: Run, groups_per_step: Count, steps_per_round: Count) -> None:
    """A rollout, several optimizer steps on its shuffled samples, then a publication.

    Args:
        groups_per_step: groups whose number of samples makes a batch (U = B/K).
        steps_per_round: optimizer steps between two publications (G).
    """
    run.declare(staleness=0)
    async for _ in run.rounds():
        groups_per_round = groups_per_step * steps_per_round
        run.pool.launch(run.prompts(groups_per_round))
        samples = run.shuffled(await run.pool.take(groups_per_round))
        for batch in batched(samples, ceil(len(samples) / steps_per_round)):
            await run.train(batch)
        await run.publish()
