"""APRIL (Zhou et al. 2025): active partial rollouts, section 3.

Over-provision, stop at N complete groups, and let the rest go on from its tokens in the next rollout.
"""

from tailrace.run import Run
from tailrace.schedules.parameters import Count, require


async def april(run: Run, N: Count, N_launched: Count) -> None:
    """Launch more groups than wanted, parked ones first; train the first N to complete; park the rest."""
    require(N_launched >= N, "N_launched", N_launched, f"fewer than N = {N} can never make N", "raise it")
    async for _ in run.rounds():
        groups = run.parked.pop(N_launched)
        run.pool.launch(groups + run.prompts(N_launched - len(groups)))
        batch = await run.pool.take(N)
        await run.pool.park()
        await run.train(batch)
        await run.publish()
