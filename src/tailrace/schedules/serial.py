"""Serial rollout, then training: Slime and veRL, the baseline of RolloutPipe (section 2.1) and RollPacker."""

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count, require_divisible
from tailrace.types import batched


async def serial(run: Run, R: Count, U: Count) -> None:
    """R groups with fixed weights; R/U optimizer steps; publish."""
    require_divisible(R, U)
    run.promise(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(R))
        for batch in batched(await run.pool.take(R), U):
            await run.train(batch)
        await run.publish()
