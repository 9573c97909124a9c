"""One step off: the recipe `one_step_off_policy` of verl (Sheng et al. 2024), after the asynchronous mode of
StreamRL (Zhong et al. 2025, arXiv 2504.15930).

    generate batch k + 1 with the weights of version k     run.pool.launch
    train batch k meanwhile                                run.train
    new weights when the engines are idle                  run.pool.ready.wait_for, run.publish
"""

from tailrace.controller.run import Run
from tailrace.rollout.order import in_order
from tailrace.schedules.parameters import Count, require_divisible
from tailrace.types import Group, batched


async def one_step_off(run: Run, groups_per_round: Count, groups_per_step: Count) -> None:
    """Train the last batch while the next one is generated. Every trained token is one publication old.

    Args:
        groups_per_round: groups of a batch (R).
        groups_per_step: groups of an optimizer step (U = B/K).
    """
    require_divisible(groups_per_round, groups_per_step)
    run.declare(staleness=1)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_per_round - len(run.pool)))  # the first batch, or a resumed one
        groups = await run.pool.take(groups_per_round)
        run.pool.launch(next_batch(run, groups_per_round))
        for batch in batched(in_order(groups), groups_per_step):
            await run.train(batch)
        await run.pool.ready.wait_for(groups_per_round)
        await run.publish()


def next_batch(run: Run, n: int) -> list[Group]:
    """The next n groups without tokens of an older version: a publication comes before they are trained.
    Only groups that a crash interrupted can have such tokens; they start from nothing."""
    groups = run.prompts(n)
    run.restart([group for group in groups if run.staleness(group)], reason="interrupted")
    return groups
