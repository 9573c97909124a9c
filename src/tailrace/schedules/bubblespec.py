"""BubbleSpec (Xu et al. 2026, arXiv 2605.08862): synchronous rollouts that use their bubbles.

    idle windows of a rollout pre-generate the next one    run.pool.draft
    the results are drafts of the next rollout             run.pool.launch, after run.publish
    the trained samples are those of a synchronous run     run.declare(staleness=0, stale="verify")

The paper drafts on ranks that have finished, and checks by speculative decoding. Here a drafted request gets
a slot of an engine, and its sample has the noise with which it would begin in the next round. So one pass
under the new weights says how many of its tokens they would have drawn. The others are generated anew; the
embedded engine drafts from what was cut (`engine.drafts`).
"""

from tailrace.controller.run import Run
from tailrace.rollout.order import in_order
from tailrace.schedules.parameters import Count, require_divisible
from tailrace.types import batched


async def bubblespec(run: Run, groups_per_round: Count, groups_per_step: Count) -> None:
    """`serial`, whose engines generate for the next round in the slots that a round leaves empty.

    Drafts go on while the trainer trains on devices of its own. Each group is drafted in one round, or two if
    a crash came between, and trained in the next, so updates cut it once or twice.

    Args:
        groups_per_round, groups_per_step: as in serial.
    """
    require_divisible(groups_per_round, groups_per_step)
    run.declare(staleness=0, stale="verify")
    async for _ in run.rounds():
        drafted = run.pool.drafted
        run.pool.launch(drafted + run.prompts(groups_per_round - len(drafted)))
        run.pool.draft(run.prompts(groups_per_round))
        groups = await run.pool.take(groups_per_round)
        for batch in batched(in_order(groups), groups_per_step):
            await run.train(batch)
        await run.publish()
