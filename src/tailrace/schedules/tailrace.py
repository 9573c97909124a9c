"""tailrace: ours. After APRIL (Zhou et al. 2025, section 2.2) and PipelineRL (Piche et al. 2025, section
4) without their waits, and after RollPacker (Gao et al. 2025, section 3) without its race.
"""

from math import ceil

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Bound, Count, Factor, Share
from tailrace.schedules.window import window
from tailrace.types import KV, Group


async def tailrace(run: Run, U: Count, in_flight: Count, staleness: Bound, kv: KV = "keep") -> None:
    """APRIL without the stop: generation never ends. Groups are accumulated as they finish, the optimizer
    steps at every U-th, the weights change in flight, and the pool is filled up again. No token is
    trained more than `staleness` publications old: the structure keeps that, nothing is thrown away for
    it."""
    run.promise(staleness=staleness)
    select = window(run, U, in_flight, staleness)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(in_flight - len(run.pool)))
        async for groups in run.pool.stream(U, select):
            await run.accumulate(groups)
        await run.step()
        await run.publish(kv=kv)


async def tailrace_on_policy(run: Run, N: Count, eta: Factor = 1.25, long_share: Share = 0.2) -> None:
    """Tail batching that wastes no token on prompts known to be long: what was among the longest
    `long_share` of the rows when it was last trained joins the queue before it starts. The others race;
    groups are accumulated as they finish. All K responses of a prompt are trained, and one that starts
    again has the noise it had, so lengths are not biased."""
    run.promise(staleness=0)
    async for _ in run.rounds(while_parked=True):
        run.pool.launch(groups := next_round(run, N, ceil(eta * N), long_share))
        async for batch in run.pool.race(min(N, len(groups))):
            await run.accumulate(batch)
        await run.step()
        await run.publish()


def next_round(run: Run, N: int, num_launched: int, long_share: float) -> list[Group]:
    """N that were put off or lost a race; or new ones, without those known to be long."""
    if len(run.parked) >= N or run.overtime:
        return run.restart(run.parked.pop(N))
    short: list[Group] = []
    while len(short) < num_launched:
        (group,) = run.prompts(1)
        if run.history.predicts_long(group.prompt, long_share):
            run.defer([group])
        else:
            short.append(group)
    return short
