"""PipelineRL (Piche et al. 2025): in-flight weight updates, Algorithm 2.

Generation never stops: H sequences are kept in flight, and new weights arrive after every optimizer step
without ending any of them.
"""

from tailrace.rollout.admission import AtMost
from tailrace.rollout.ring import Full
from tailrace.run import Run
from tailrace.schedules.parameters import Count, Share, require
from tailrace.types import KV


async def pipelinerl(
    run: Run, U: Count, H: Count, room: Count, full: Full = "drop", kv: KV = "keep", ess_floor: Share = 0.0
) -> None:
    """U groups a step, at most `room` complete groups between actor and trainer. A batch whose effective
    sample size is below the floor is given up, and the next one is purely of the current weights (earlier
    version, Algorithm 2)."""
    require(room >= U, "room", room, f"so few groups never make a step of U = {U}", "raise it")
    run.pool.admission = AtMost(requests=H)
    run.pool.feed(run.prompts, room=room, full=full)
    async for _ in run.rounds():
        groups = await run.pool.take(U)
        if ess_floor and await run.ess(groups) < ess_floor:
            run.drop(groups, "low ess")
            groups = await run.pool.take(U, run.on_policy)
        await run.train(groups)
        await run.publish(kv=kv)
