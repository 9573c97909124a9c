"""APRIL (Zhou et al. 2025): active partial rollouts, section 2.2.

over-provisioned generation   N' > N groups                               run.pool.launch
early termination             at the N-th complete group                  run.pool.take, run.pool.park
buffering continuations       tokens, finished samples and rewards        run.parked
prioritized resumption        parked groups first, from their tokens      run.parked.pop
"""

from math import inf

from tailrace.controller.run import Run
from tailrace.rollout.admission import earliest
from tailrace.schedules.parameters import Bound, Count, require
from tailrace.schedules.window import window
from tailrace.types import KV


async def april(
    run: Run,
    groups_per_round: Count,
    groups_launched: Count,
    staleness: Bound | None = None,
    kv: KV = "recompute",
) -> None:
    """Train the first groups to complete, park the others, and continue them in the next round.

    As in the published code, resumed responses get their KV cache from the new weights, and the old log-probs
    are recomputed at training (`algorithm.old_policy`).

    Args:
        groups_per_round: groups trained in a round (N).
        groups_launched: groups in service at the start of a round (N'), at least groups_per_round.
        staleness: bound on the age of a trained token, in publications; None: no bound. With a bound, the
            trainer waits for the groups that are due.
        kv: "recompute" (as published) or "keep" the KV cache of a parked response.
    """
    N = groups_per_round
    require(groups_launched >= N, "groups_launched", groups_launched, f"{N} groups are trained", "raise it")
    run.promise(staleness=inf if staleness is None else staleness)
    select = earliest if staleness is None else window(run, N, groups_launched, staleness)
    async for _ in run.rounds():
        groups = run.parked.pop(groups_launched)
        run.pool.launch(groups + run.prompts(groups_launched - len(groups)))
        batch = await run.pool.take(N, select)
        await run.pool.park()
        await run.train(batch)
        await run.publish(kv=kv)
