"""RolloutPipe (Chen et al. 2026): complete-group pipelining and frontier-group dispatch. Algorithm 1.

    lines 8-12   FGD_ADMIT        run.pool.admission: Frontier(F_w) as printed, FrontierFirst(F_w), AtMost()
    lines 13-15  ROLLOUT_WORKER   the pool: generate, judge, filter, advantages
    lines 16-19  CGP_HANDOFF      run.pool.take(U), feasible(tokens)
    lines 20-23  TRAIN            accumulate; the optimizer steps at U groups; publish when all R are consumed

All R groups have the round's weights, and the old policy of every step is the round's published one: against
`serial`, only the order and the moment of training change.
"""

from tailrace.rollout.admission import FIFO, Admission
from tailrace.rollout.selection import feasible, fits
from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count, require_divisible


async def rolloutpipe(
    run: Run, R: Count, U: Count, tokens: Count = 65_536, admission: Admission = FIFO
) -> None:
    """The earliest U complete groups go to the trainer while later ones are generated; they travel in
    feasible batches of at most `tokens` tokens."""
    require_divisible(R, U)
    run.promise(staleness=0)
    run.pool.admission = admission
    async for _ in run.rounds():
        run.pool.launch(run.prompts(R))
        for _ in range(R // U):
            for batch in feasible(await run.pool.take(U), tokens):
                await run.accumulate(batch)
            await run.step()
        await run.publish()


async def rolloutpipe_eager(
    run: Run, R: Count, U: Count, tokens: Count = 65_536, admission: Admission = FIFO
) -> None:
    """Ours: whatever is complete is accumulated at once, without waiting for U; the steps stay at U."""
    require_divisible(R, U)
    run.promise(staleness=0)
    run.pool.admission = admission
    async for _ in run.rounds():
        run.pool.launch(run.prompts(R))
        for _ in range(R // U):
            async for batch in run.pool.stream(U, fits(tokens)):
                await run.accumulate(batch)
            await run.step()
        await run.publish()
