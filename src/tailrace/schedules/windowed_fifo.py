"""Windowed FIFO: the schedule of Forge (MiniMax 2026, arXiv 2605.26494, section 6.2.4).

    active groups, drawn in order       run.pool.launch
    the window behind the oldest one    fifo_window
    greedy inside the window            run.pool.take

Strict FIFO waits for every straggler; taking what completes first leaves the stragglers behind. The window
moves on only when the oldest group is trained, so a group is overtaken by at most window - 1 younger ones.

With B groups active, U a step and a window of W, at most B - 1 older and W - 1 younger groups are trained
between the launch of a group and its own training. So no token is older than (B + W - 2) // U publications.

`tinker_async` is that of tinker-cookbook 0.6, rl/train.py, but samples in flight go on with new weights.
"""

from collections.abc import Collection
from math import inf

from tailrace.controller.run import Run
from tailrace.rollout.admission import Select
from tailrace.rollout.order import in_order
from tailrace.schedules.parameters import Bound, Count, KVRule, require
from tailrace.types import Group


async def windowed_fifo(
    run: Run, groups_per_step: Count, groups_in_flight: Count, window: Count, kv: KVRule = "keep"
) -> None:
    """Generation never stops; the oldest groups are trained first, in any order within a window.

    Args:
        groups_per_step: groups of an optimizer step (U = B/K).
        groups_in_flight: groups that are active, at least groups_per_step.
        window: groups, from the oldest active one on, that may be trained. 1: strict FIFO.
        kv: as in pipelinerl.
    """
    U, B = groups_per_step, groups_in_flight
    require(B >= U, "groups_in_flight", B, f"{U} groups are trained in a step", "raise it")
    run.declare(staleness=(B + window - 2) // U)
    select = fifo_window(run, window)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_in_flight - len(run.pool)))
        await run.train(await run.pool.take(groups_per_step, select))
        await run.publish(kv=kv)


def fifo_window(run: Run, width: int) -> Select:
    """The complete groups among the `width` ones from the oldest active one on. A group that is chosen is no
    longer active, so the window moves behind the oldest one."""

    def select(ready: Collection[Group], wanted: int) -> list[Group]:
        active = in_order(run.pool.groups)[::-1]
        chosen: dict[Group, None] = {}
        while active and len(chosen) < wanted:
            if active[-1] in chosen:
                active.pop()
                continue
            end = active[-1].order + width
            first = next((group for group in ready if group not in chosen and group.order < end), None)
            if first is None:
                break
            chosen[first] = None
        return list(chosen)

    return select


async def tinker_async(run: Run, groups_per_step: Count, steps_off_policy: Bound) -> None:
    """No bound and no loss: the complete groups of the oldest weights are trained, whenever they end.

    Args:
        groups_per_step: groups of an optimizer step (B).
        steps_off_policy: (S + 1) B groups are begun and not trained (S, max_steps_off_policy).
    """

    def oldest_first(ready: Collection[Group], wanted: int) -> list[Group]:
        return sorted(ready, key=run.staleness, reverse=True)[:wanted]

    run.declare(staleness=inf)
    async for _ in run.rounds():
        run.pool.launch(run.prompts((steps_off_policy + 1) * groups_per_step - len(run.pool)))
        await run.train(await run.pool.take(groups_per_step, oldest_first))
        await run.publish()
