"""tailrace: our own schedules.

`tailrace` takes up APRIL (Zhou et al. 2025, 2.2) and PipelineRL (Piche et al. 2025, 4) without their waits.
`tailrace_on_policy` takes up RollPacker (Gao et al. 2025, 3) without racing prompts that are known to be
long.
"""

from math import ceil

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Bound, Count, Factor, Share
from tailrace.schedules.window import window
from tailrace.types import KV, Group


async def tailrace(
    run: Run, groups_per_step: Count, groups_in_flight: Count, staleness: Bound, kv: KV = "keep"
) -> None:
    """APRIL without the stop: generation never ends, and the weights change in flight.

    Groups are accumulated as they complete. After every step the pool is filled up again. The selection keeps
    the bound on staleness; no token is thrown away for it.

    Args:
        groups_per_step: groups of an optimizer step (U = B/K).
        groups_in_flight: groups in the pool, at most (staleness + 1) * groups_per_step.
        staleness: bound on the age of a trained token, in publications.
        kv: "keep" or "recompute" the KV cache of sequences in flight when the weights change.
    """
    run.promise(staleness=staleness)
    select = window(run, groups_per_step, groups_in_flight, staleness)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_in_flight - len(run.pool)))
        async for groups in run.pool.stream(groups_per_step, select):
            await run.accumulate(groups)
        await run.step()
        await run.publish(kv=kv)


async def tailrace_on_policy(
    run: Run, groups_per_round: Count, prompt_speculation: Factor = 1.25, long_share: Share = 0.2
) -> None:
    """Tail batching that wastes no token on prompts known to be long.

    Rows of the data whose longest response was among the longest when they were last trained join the queue
    before they start. The others race. All K responses of a prompt are trained, and a restarted prompt has
    the same noise as before, so response lengths are not biased.

    Args:
        groups_per_round: groups trained in a round (N).
        prompt_speculation: groups launched in a race, as a multiple of N (eta). 1: no race.
        long_share: share of the rows that counts as long.
    """
    run.promise(staleness=0)
    num_launched = ceil(prompt_speculation * groups_per_round)
    async for _ in run.rounds(while_parked=True):
        run.pool.launch(groups := next_round(run, groups_per_round, num_launched, long_share))
        async for batch in run.pool.race(min(groups_per_round, len(groups))):
            await run.accumulate(batch)
        await run.step()
        await run.publish()


def next_round(run: Run, groups_per_round: int, num_launched: int, long_share: float) -> list[Group]:
    """The deferred groups if there are enough for a round; else new groups without those known to be long."""
    if len(run.parked) >= groups_per_round or run.overtime:
        return run.restart(run.parked.pop(groups_per_round))
    short: list[Group] = []
    while len(short) < num_launched:
        (group,) = run.prompts(1)
        if run.history.predicts_long(group.prompt, long_share):
            run.defer([group])
        else:
            short.append(group)
    return short
