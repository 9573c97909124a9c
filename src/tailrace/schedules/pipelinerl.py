"""PipelineRL (Piche et al. 2025): in-flight weight updates, section 4, Algorithm 2.

    lines 3-8, 12   H sequences are kept in flight                   run.pool.feed, AtMost
    lines 19-20     B sequences, one optimizer step                  run.pool.take, run.train
    lines 9-11, 18  new weights between two decode steps             run.publish
    earlier version, lines 20-24: the guard                          run.ess, run.drop

Every stage is bounded (section 4, ring buffers). Generated groups wait in a ring for the scorers, and
complete ones in a ring for the trainer. No ring ever holds more than its size. A full one drops its oldest
group, or it blocks: no prompt is drawn, and the groups in flight that end meanwhile wait in the stage before.

The rings bound the lag, if rewards come in the order in which they are asked for. From the moment at which a
group is drawn, at most 2 ring_groups + scoring_groups + n groups are trained before it: those that are
generated already, and the n groups whose generation ends before its own. So its oldest token has a lag of at
most (2 ring_groups + scoring_groups + n) / groups_per_step + 2 optimizer steps, where 2 are the step and the
publication that are under way when it is drawn. For equal lengths n is the number of groups in flight.
"""

from math import inf
from typing import Literal

from tailrace.controller.run import Run
from tailrace.rollout.admission import AtMost, Full, earliest
from tailrace.schedules.parameters import Bound, Count, KVRule, Share, require
from tailrace.schedules.window import VerifiedWindow
from tailrace.types import Group


async def pipelinerl(
    run: Run,
    groups_per_step: Count,
    in_flight_per_engine: Count,
    ring_groups: Count,
    ring_full: Full = "drop_oldest",
    scoring_groups: Count | None = None,
    kv: KVRule = "keep",
    min_ess: Share = 0.0,
    staleness: Bound | None = None,
    stale: Literal["mask", "verify"] = "mask",
    verify_max_cuts: Count = 4,
) -> None:
    """Generation never stops; the weights are updated after every optimizer step.

    Args:
        groups_per_step: groups of an optimizer step (U = B/K).
        in_flight_per_engine: sequences in flight on each engine (H).
        ring_groups: generated groups that may wait for the scorers, and as many complete ones for the
            trainer; at least groups_per_step.
        ring_full: "drop_oldest" group, or "block": draw no new prompts; groups in flight wait for room.
        scoring_groups: generated groups that the scorers have at a time. None: as ring_groups. At least what
            they score in the time that a reward takes.
        kv: "keep" or "recompute" the KV cache of sequences in flight when the weights change; a number:
            recompute it when the drift since then, the sum over steps of mismatch_kl / lag/mean, reaches it.
        min_ess: a batch whose effective sample size is below this is dropped, and so are all groups with
            older tokens, until a batch of the current weights is complete; that batch is always trained.
            0: no guard.
        staleness: bound on the age of a trained token, in publications. Nothing waits: tokens that are too
            old when their sample is trained are masked out of the loss. None: no bound.
        stale, verify_max_cuts: as in tailrace; "verify" needs a bound. All stages together then hold
            verify_max_cuts * groups_per_step groups, for which the rings have room.
    """
    problem = f"the ring never holds the {groups_per_step} groups of a step"
    require(ring_groups >= groups_per_step, "ring_groups", ring_groups, problem, "raise it")
    run.declare(staleness=inf if staleness is None else staleness, stale=stale)
    run.pool.admission = AtMost(requests_per_engine=in_flight_per_engine)
    room, most, scoring, select = ring_groups, inf, scoring_groups or ring_groups, earliest
    if stale == "verify":
        room = most = verify_max_cuts * groups_per_step
        select = VerifiedWindow(run, groups_per_step, verify_max_cuts, room).select
    run.pool.feed(run.prompts, room=room, full=ring_full, scoring=scoring, most=most)
    async for _ in run.rounds():
        groups = await run.pool.take(groups_per_step, select)
        if min_ess and await run.ess(groups) < min_ess:
            run.drop(groups, "low ess")
            groups = await fresh(run, groups_per_step)
        await run.train(groups)
        await run.publish(kv=kv)


async def fresh(run: Run, n: int) -> list[Group]:
    """The next n groups whose tokens are all of the published weights. Older groups are dropped as they come:
    if they stayed in the ring, a ring that blocks would be full of them."""
    groups: list[Group] = []
    while len(groups) < n:
        (group,) = await run.pool.take(1)
        if run.staleness(group):
            run.drop([group], "stale")
        else:
            groups.append(group)
    return groups
