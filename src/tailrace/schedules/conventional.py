"""Conventional RL, as PipelineRL (Piche et al. 2025) defines it: section 2.2, Algorithm 1.

    generation   B * G sequences with the round's weights, shuffled, split into G batches of B
    training     G optimizer steps, each one step more off-policy than the one before

Its maximum lag is G - 1 optimizer steps. To compare it with a PipelineRL of maximum lag g_max, choose
G = g_max + 1.
"""

from itertools import pairwise

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count


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
        bounds = [len(samples) * number // steps_per_round for number in range(steps_per_round + 1)]
        for start, end in pairwise(bounds):
            if start < end:  # samples may have failed
                await run.train(samples[start:end])
        await run.publish()
