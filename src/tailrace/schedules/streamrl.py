"""StreamRL (Zhong et al. 2025, arXiv 2504.15930): stream generation, and samples that are predicted to be
long first.

    stream generation       a sample goes to the trainer when it is complete      run.pool.stream
    scheduling              the longest predicted samples start first             longest_first
    asynchronous mode       the next batch is generated while the last is trained

The paper ranks prompts by a small model that was trained for it. Here the length of the responses to a row in
its last epoch ranks it, so there is no order in the first epoch. The paper's dispatch of long samples to
instances of their own and its split of the devices are not implemented: the router takes the least loaded
engine. A group is handed to the trainer when all its samples are complete, because advantages need them.
"""

from tailrace.controller.run import Run
from tailrace.rollout.order import ORDERS, Order
from tailrace.schedules.one_step_off import next_batch
from tailrace.schedules.parameters import Count, KVRule
from tailrace.schedules.rolloutpipe import periodic_asynchrony


async def streamrl(run: Run, groups_per_round: Count, order: Order = "longest_first") -> None:
    """The synchronous mode: complete groups are trained while the rest of the batch is generated, as in
    `periodic_asynchrony`.

    Args:
        groups_per_round: groups of a batch, and of its optimizer step.
        order: which of the requests that wait are served first (`rollout/order.py`).
    """
    run.pool.order = ORDERS[order]
    await periodic_asynchrony(run, groups_per_round)


async def streamrl_async(
    run: Run, groups_per_round: Count, kv: KVRule = "keep", order: Order = "longest_first"
) -> None:
    """The asynchronous mode: the next batch starts when the last group of this one is complete.

    The paper's service takes new weights between two batches. Here the sequences in flight get them, too, so
    no token is older than in the paper.

    Args:
        groups_per_round, order: as in streamrl.
        kv: as in pipelinerl.
    """
    run.declare(staleness=1)
    run.pool.order = ORDERS[order]
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_per_round - len(run.pool)))  # the first batch, or a resumed one
        num_left = groups_per_round
        async for groups in run.pool.stream(groups_per_round):
            num_left -= len(groups)
            if not num_left:
                run.pool.launch(next_batch(run, groups_per_round))
            await run.accumulate(groups)
        await run.step()
        await run.publish(kv=kv)
