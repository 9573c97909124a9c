"""Conventional RL, as PipelineRL (Piche et al. 2025) defines it: section 2.2, Algorithm 1.

    generation   B * G sequences with the round's weights, shuffled, split into G batches of B
    training     G optimizer steps, each one step more off-policy than the one before

Its largest lag is G - 1 optimizer steps: the fair opponent of a PipelineRL with g_max has G = g_max + 1.
"""

from math import ceil

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count
from tailrace.types import batched


async def conventional(run: Run, U: Count, G: Count) -> None:
    """U * G groups a round, B = U * K shuffled samples a step, G steps; then publish."""
    run.promise(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(U * G))
        samples = run.shuffled(await run.pool.take(U * G))
        for batch in batched(samples, ceil(len(samples) / G)):
            await run.train(batch)
        await run.publish()
