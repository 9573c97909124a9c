"""APRIL (Zhou et al. 2025): active partial rollouts, section 2.2.

over-provisioned generation   N' = N_launched > N groups                  run.pool.launch
early termination             at the N-th complete group                  run.pool.take, run.pool.park
buffering continuations       tokens, finished siblings and rewards       run.parked
prioritized resumption        parked groups first, from their tokens      run.parked.pop
"""

from math import inf

from tailrace.rollout.selection import earliest
from tailrace.controller.run import Run
from tailrace.schedules.parameters import Bound, Count, require
from tailrace.schedules.window import window
from tailrace.types import KV


async def april(
    run: Run, N: Count, N_launched: Count, staleness: Bound | None = None, kv: KV = "keep"
) -> None:
    """Train the first N groups to complete, park the rest, go on from its tokens. staleness: how many rounds
    old a token may become; groups that are due are then waited for."""
    require(N_launched >= N, "N_launched", N_launched, f"fewer than N = {N} can never make N", "raise it")
    run.promise(staleness=inf if staleness is None else staleness)
    select = earliest if staleness is None else window(run, N, N_launched, staleness)
    async for _ in run.rounds():
        groups = run.parked.pop(N_launched)
        run.pool.launch(groups + run.prompts(N_launched - len(groups)))
        batch = await run.pool.take(N, select)
        await run.pool.park()
        await run.train(batch)
        await run.publish(kv=kv)
