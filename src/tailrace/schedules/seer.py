"""Seer (Qin et al. 2025, arXiv 2511.14617): its scheduling, which is synchronous and on-policy.

    divided rollout            single requests are dispatched, not groups        run.pool
    context-aware scheduling   one request of each group, the probe, goes first  probe_first
                               then the groups with the longest known response

A group without a finished response counts as the longest. The paper also divides a request into chunks that
may move between engines, through a KV cache that all engines share, and decodes speculatively within a group.
Both belong to the engines and are not implemented; so a request stays on its engine.
"""

from tailrace.controller.run import Run
from tailrace.rollout.order import ORDERS, Order
from tailrace.schedules.parameters import Count
from tailrace.schedules.serial import serial


async def seer(
    run: Run, groups_per_round: Count, groups_per_step: Count, order: Order = "probe_first"
) -> None:
    """`serial`, whose requests start in the order of their predicted lengths.

    The order matters when the engines have fewer slots than a round has samples.

    Args:
        groups_per_round, groups_per_step: as in serial.
        order: as in streamrl.
    """
    run.pool.order = ORDERS[order]
    await serial(run, groups_per_round, groups_per_step)
