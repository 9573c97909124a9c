"""Seer (Qin et al. 2025, arXiv 2511.14617): its scheduling, which is synchronous and on-policy.

    divided rollout            single requests are dispatched, not groups        run.pool
    context-aware scheduling   one request of each group, the probe, goes first  probe_first
                               then the groups with the longest known response

A group without a finished response counts as the longest. The paper also divides a request into chunks that
may move between engines, through a KV cache that all engines share, and decodes speculatively within a group.
Both belong to the engines and are not implemented; so a request stays on its engine.
"""

from math import inf

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count
from tailrace.schedules.serial import serial
from tailrace.types import Sample


async def seer(run: Run, groups_per_round: Count, groups_per_step: Count) -> None:
    """A rollout whose requests start in the order of their predicted lengths, then optimizer steps.

    The order matters when the engines have fewer slots than a round has samples.

    Args:
        groups_per_round: groups of a rollout (R).
        groups_per_step: groups of an optimizer step (U = B/K).
    """
    run.pool.order = probe_first
    await serial(run, groups_per_round, groups_per_step)


def probe_first(sample: Sample) -> tuple[float, ...]:
    """The first sample of each group; then the others, the longest finished response of the group first."""
    group = sample.group
    if sample.id.number == 0:
        return (0, group.order)
    return (1, -max((kept.num_tokens for kept in group.kept), default=inf), group.order)
