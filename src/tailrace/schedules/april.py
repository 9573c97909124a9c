"""APRIL (Zhou et al. 2025): active partial rollouts, section 2.2.

over-provisioned generation   N' > N groups                               run.pool.launch
early termination             at the N-th complete group                  run.pool.take, run.pool.park
buffering continuations       tokens, finished samples and rewards        run.parked
prioritized resumption        parked groups first, from their tokens      run.parked.pop

With DAPO's filter (section 3) the published code samples otherwise; `april_dapo` does as it does
(RLsys-Foundation/APRIL, slime/rollout/sglang_example.py, September 2025).
"""

from math import inf
from typing import Literal

from tailrace.controller.run import Run
from tailrace.rollout.admission import earliest
from tailrace.schedules.parameters import Bound, Count, KVRule, require
from tailrace.schedules.window import VerifiedWindow, Window
from tailrace.types import Group


async def april(
    run: Run,
    groups_per_round: Count,
    groups_launched: Count,
    staleness: Bound | None = None,
    kv: KVRule = "recompute",
    stale: Literal["wait", "verify"] = "wait",
    verify_max_cuts: Count = 4,
) -> None:
    """Train the first groups to complete, park the others, and continue them in the next round.

    As in the published code, resumed responses get their KV cache from the new weights, and the old log-probs
    are recomputed at training (`algorithm.old_policy`).

    Args:
        groups_per_round: groups trained in a round (N).
        groups_launched: groups in service at the start of a round (N'), at least groups_per_round.
        staleness: bound on the age of a trained token, in publications; None: no bound. With a bound, the
            trainer waits for the groups that are due.
        kv: "keep" or "recompute" (as published) the KV cache of parked responses when the weights change;
            a number: recompute it when the drift since then, the sum over steps of mismatch_kl / lag/mean,
            reaches it.
        stale, verify_max_cuts: as in tailrace; "verify" needs a bound.
    """
    N = groups_per_round
    require(groups_launched >= N, "groups_launched", groups_launched, f"{N} groups are trained", "raise it")
    run.declare(staleness=inf if staleness is None else staleness, stale=stale)
    select = earliest
    if stale == "verify":
        select = VerifiedWindow(run, N, verify_max_cuts, groups_launched, "groups_launched").select
    elif staleness is not None:
        select = Window(run, N, groups_launched, staleness).select
    async for _ in run.rounds():
        groups = run.parked.pop(groups_launched)
        run.pool.launch(groups + run.prompts(groups_launched - len(groups)))
        batch = await run.pool.take(N, select)
        await run.pool.park()
        await run.train(batch)
        await run.publish(kv=kv)


async def april_dapo(
    run: Run, groups_per_round: Count, groups_per_draw: Count, kv: KVRule = "recompute"
) -> None:
    """APRIL with dynamic sampling, as in the published code: prompts are drawn in batches until N groups pass
    the filter. Groups that are left over come first in the next batch. No bound on staleness.

    Args:
        groups_per_round: groups trained in a round (N).
        groups_per_draw: groups of a batch (N', `over_sampling_batch_size`), parked ones first.
        kv: as in `april`.
    """
    run.declare(staleness=inf)
    async for _ in run.rounds():
        await run.train(await sampled(run, groups_per_round, groups_per_draw))
        await run.publish(kv=kv)


async def sampled(run: Run, num_groups: int, groups_per_draw: int) -> list[Group]:
    """The first groups that pass the filter; all others are parked. Whenever fewer than `num_groups` are
    alive (unfinished, or passed by the filter), a batch is launched."""
    run.pool.replace = None
    while len(run.pool.ready) < num_groups:
        if len(run.pool) < num_groups:
            groups = run.parked.pop(groups_per_draw)
            run.pool.launch(groups + run.prompts(groups_per_draw - len(groups)))
        else:
            await run.pool.ready.changed.wait("groups that pass the filter")
    batch = await run.pool.take(num_groups)
    await run.pool.park()
    return batch
