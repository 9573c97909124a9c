"""PipelineRL (Piche et al. 2025): in-flight weight updates, section 4, Algorithm 2.

    lines 3-8, 12   H sequences are kept in flight                   run.pool.feed, AtMost(H)
    lines 19-20     B sequences, one optimizer step                  run.pool.take, run.ahead
    lines 9-11, 18  new weights between two decode steps             its publish
    earlier version, lines 20-24: the guard                          run.ess, run.drop

Between actor and trainer stands a ring of complete groups; when it is full, it holds the actor or drops
its oldest (section 4, ring buffers).
"""

from math import inf

from tailrace.rollout.admission import AtMost
from tailrace.rollout.ready_queue import Full
from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count, Share, require
from tailrace.types import KV, Group


async def pipelinerl(
    run: Run,
    U: Count,
    H: Count,
    room: Count,
    full: Full = "drop",
    kv: KV = "keep",
    ess_floor: Share = 0.0,
    steps: Count = 1,
) -> None:
    """U groups a step, at most `room` complete groups between actor and trainer. Within the `steps` of a
    round, the trainer has the next batch while it computes one. A batch whose effective sample size is below
    the floor is given up, and so is all that holds an older token, until U groups of the current weights are
    there; those are trained in any case. Its lag has no bound; it is measured."""
    require(room >= U, "room", room, f"so few groups never make a step of U = {U}", "raise it")
    run.promise(staleness=inf)
    run.pool.admission = AtMost(requests=H)
    run.pool.feed(run.prompts, room=room, full=full)
    async for _ in run.rounds():
        async with run.ahead(publish=kv) as ahead:
            for _ in range(steps):
                groups = await run.pool.take(U)
                if ess_floor and await run.ess(groups) < ess_floor:
                    await ahead.trained()
                    run.drop(groups, "low ess")
                    groups = await fresh(run, U)
                await ahead.train(groups)


async def fresh(run: Run, U: int) -> list[Group]:
    """The next U groups whose every token is of the published weights. Older ones are dropped as they come:
    left where they are, they would fill a ring that holds, and halt the steps after this one again."""
    groups: list[Group] = []
    while len(groups) < U:
        (group,) = await run.pool.take(1)
        if run.staleness(group):
            run.drop([group], "stale")
        else:
            groups.append(group)
    return groups
