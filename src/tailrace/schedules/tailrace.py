"""tailrace: ours. After APRIL (Zhou et al. 2025, section 2.2) and PipelineRL (Piche et al. 2025, section
4) without their waits, and after RollPacker (Gao et al. 2025, section 3) without its race.
"""

from tailrace.run import Run
from tailrace.schedules.parameters import Bound, Count, Share
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


async def tailrace_on_policy(run: Run, N: Count, long_share: Share = 0.125) -> None:
    """Tail batching without its race, so that nothing is wasted and lengths are not biased: a prompt that was
    among the longest `long_share` of the rows when it was last trained is put off before it starts, and N of
    those make a round of their own. Groups are accumulated as they finish."""
    run.promise(staleness=0)
    async for _ in run.rounds(while_parked=True):
        run.pool.launch(groups := next_round(run, N, long_share))
        async for batch in run.pool.stream(len(groups)):
            await run.accumulate(batch)
        await run.step()
        await run.publish()


def next_round(run: Run, N: int, long_share: float) -> list[Group]:
    """N that were put off, or the next N that need not be."""
    if len(run.parked) >= N or run.overtime:
        return run.parked.pop(N)
    short: list[Group] = []
    while len(short) < N:
        (group,) = run.prompts(1)
        if run.history.predicts_long(group.prompt, long_share):
            run.defer([group])
        else:
            short.append(group)
    return short
