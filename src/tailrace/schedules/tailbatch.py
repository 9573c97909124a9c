"""RollPacker (Gao et al. 2025): tail batching, section 4.1.

Short rounds race, and what loses waits for a long round of its own, so that one long response never holds a
round of short ones up. Both kinds are on-policy: a deferred prompt starts again from nothing.
"""

from math import ceil

from tailrace.run import Run
from tailrace.schedules.parameters import Count, Factor
from tailrace.types import Group


async def tailbatch(run: Run, P0: Count, eta_prompts: Factor = 1.25, eta_responses: Factor = 1.25) -> None:
    """P0 groups a round. A factor of 1 switches that race off."""
    run.promise(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(next_round(run, P0, eta_prompts, eta_responses))
        groups = await run.pool.take(P0)
        await run.pool.park()
        await run.train(groups)
        await run.publish()


def next_round(run: Run, P0: int, eta_prompts: float, eta_responses: float) -> list[Group]:
    """A long round as soon as the queue of deferred prompts fills one; else a short one."""
    if len(run.parked) >= P0:
        return run.restart(run.parked.pop(P0), reason="deferred")
    return run.prompts(ceil(eta_prompts * P0), samples=ceil(eta_responses * run.K))
