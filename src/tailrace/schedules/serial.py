"""Serial rollout, then training: Slime and veRL, the baseline of RolloutPipe (2.1) and RollPacker."""

from tailrace.controller.run import Run
from tailrace.rollout.order import in_order
from tailrace.schedules.parameters import Count, require_divisible
from tailrace.types import batched


async def serial(run: Run, groups_per_round: Count, groups_per_step: Count) -> None:
    """A rollout with fixed weights, then optimizer steps on its groups in the order of their prompts.

    Args:
        groups_per_round: groups of a rollout (R).
        groups_per_step: groups of an optimizer step (U = B/K).
    """
    require_divisible(groups_per_round, groups_per_step)
    run.declare(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_per_round))
        groups = await run.pool.take(groups_per_round)
        for batch in batched(in_order(groups), groups_per_step):
            await run.train(batch)
        await run.publish()
