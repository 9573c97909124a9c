"""Periodic Asynchrony (Lu 2025, arXiv 2511.18871): the producer and the consumer of one iteration overlap.

    weights go to the engines at the start of an iteration     run.publish
    the producer generates all groups with these weights       run.pool.launch
    the consumer trains groups in the order of completion      run.pool.stream, run.accumulate
    one optimizer step at the end of the iteration             run.step

It is `rolloutpipe_eager` with one optimizer step a round. The paper's other parts, one model for policy, old
policy and reference and attention that shares the prompt of a group, belong to a trainer.
"""

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count


async def periodic_asynchrony(run: Run, groups_per_round: Count) -> None:
    """Generation and training of one iteration run at the same time; all tokens are on-policy.

    Args:
        groups_per_round: groups of an iteration, and of its optimizer step.
    """
    run.promise(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_per_round))
        async for groups in run.pool.stream(groups_per_round):
            await run.accumulate(groups)
        await run.step()
        await run.publish()
