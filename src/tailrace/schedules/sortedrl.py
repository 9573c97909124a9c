"""SortedRL (Zhang et al. 2026, arXiv 2603.23414): online length-aware scheduling.

    a rollout batch larger than the update batch         run.pool.launch
    short samples first: an update when enough are done  run.pool.take, run.pool.park
    new prompts when the whole batch is consumed         run.parked.pop

The rest of the batch is interrupted at each update. In partial mode it goes on from its tokens; in on-policy
mode it starts again from nothing. Written from the abstract and secondary sources: the paper schedules single
samples, here groups, because advantages need whole groups.
"""

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count, KVRule, require_divisible
from tailrace.schedules.window import Window
from tailrace.types import Group


async def sortedrl(
    run: Run, groups_per_round: Count, groups_per_step: Count, kv: KVRule = "recompute"
) -> None:
    """Partial mode: a batch is trained from its shortest groups to its longest, one step a round.

    No token is thrown away. The last groups of a batch are groups_per_round / groups_per_step - 1
    publications old.

    Args:
        groups_per_round: groups of a rollout batch (R).
        groups_per_step: groups of an optimizer step (U).
        kv: as in pipelinerl, of an interrupted response.
    """
    require_divisible(groups_per_round, groups_per_step)
    bound = groups_per_round // groups_per_step - 1
    run.declare(staleness=bound)
    select = Window(run, groups_per_step, groups_per_round, bound).select
    async for _ in run.rounds(while_parked=True):
        parked = run.parked.pop(groups_per_round)
        run.pool.launch(parked or rest_of_batch(run, groups_per_round, groups_per_step))
        batch = await run.pool.take(min(groups_per_step, len(run.pool)), select)
        await run.pool.park()
        await run.train(batch)
        await run.publish(kv=kv)


async def sortedrl_on_policy(run: Run, groups_per_round: Count, groups_per_step: Count) -> None:
    """On-policy mode: what an update interrupts is thrown away, and its prompts start again.

    Args:
        groups_per_round, groups_per_step: as in sortedrl.
    """
    require_divisible(groups_per_round, groups_per_step)
    run.declare(staleness=0)
    async for _ in run.rounds(while_parked=True):
        interrupted = run.restart(run.parked.pop(groups_per_round))
        run.pool.launch(interrupted or rest_of_batch(run, groups_per_round, groups_per_step))
        batch = await run.pool.take(min(groups_per_step, len(run.pool)))
        await run.pool.park()
        await run.train(batch)
        await run.publish()


def rest_of_batch(run: Run, groups_per_batch: int, groups_per_round: int) -> list[Group]:
    """The prompts of a batch that are not trained yet: all in its first round; later, after a crash, those
    that it interrupted."""
    return run.prompts(groups_per_batch - run.round * groups_per_round % groups_per_batch)
