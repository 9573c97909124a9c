"""RollPacker (Gao et al. 2025): tail batching, section 3; the stream trainer, section 4.4.

Short rounds race: the first P0 prompts, the first K responses of each. What loses joins the long-prompt queue
(`run.parked`); when that holds P0 prompts, they have a round without a race. Both are on-policy: a deferred
prompt starts again from nothing. A factor of 1 switches that race off. What is queued after the last round is
flushed, so that no prompt is left out.
"""

from functools import partial
from math import ceil, inf

from tailrace.rollout.admission import AtMost
from tailrace.controller.run import Run
from tailrace.schedules.parameters import Count, Factor
from tailrace.types import Group


async def tailbatch(run: Run, P0: Count, eta_prompts: Factor = 1.25, eta_responses: Factor = 1.25) -> None:
    """P0 groups a round, one optimizer step."""
    run.promise(staleness=0)
    async for _ in run.rounds(while_parked=True):
        run.pool.launch(groups := next_round(run, P0, eta_prompts, eta_responses))
        batch = await run.pool.take(min(P0, len(groups)))
        await run.pool.park()
        await run.train(batch)
        await run.publish()


async def rollpacker(run: Run, P0: Count, eta_prompts: Factor = 1.25, eta_responses: Factor = 1.25) -> None:
    """With the stream trainer (Algorithm 1, line 23): complete groups are accumulated while the rollout goes
    on, and the optimizer steps at its end."""
    run.promise(staleness=0)
    async for _ in run.rounds(while_parked=True):
        run.pool.launch(groups := next_round(run, P0, eta_prompts, eta_responses))
        async for batch in run.pool.race(min(P0, len(groups))):
            await run.accumulate(batch)
        await run.step()
        await run.publish()


async def tailbatch_dapo(run: Run, P0: Count, requests: Count, eta_responses: Factor = 1.25) -> None:
    """With DAPO's dynamic sampling (section 7): at most so many requests at once, and new prompts until
    P0 groups pass the filter. What is filtered never joins the queue."""
    run.promise(staleness=0)
    run.pool.admission = AtMost(requests=requests)
    async for _ in run.rounds(while_parked=True):
        if long := long_round(run, P0):
            run.pool.launch(run.restart(long))
        else:
            run.pool.feed(partial(run.prompts, samples=ceil(eta_responses * run.group_size)), room=inf, full="hold")
        batch = await run.pool.take(len(long) or P0)
        await run.pool.park()
        await run.train(batch)
        await run.publish()


async def tailbatch_async(
    run: Run, P0: Count, eta_prompts: Factor = 1.25, eta_responses: Factor = 1.25
) -> None:
    """Off-policy: the queued prompts go on as partial rollouts instead of from nothing."""
    run.promise(staleness=inf)
    async for _ in run.rounds(while_parked=True):
        run.pool.launch(groups := long_round(run, P0) or short_round(run, P0, eta_prompts, eta_responses))
        batch = await run.pool.take(min(P0, len(groups)))
        await run.pool.park()
        await run.train(batch)
        await run.publish()


def next_round(run: Run, P0: int, eta_prompts: float, eta_responses: float) -> list[Group]:
    return run.restart(long_round(run, P0)) or short_round(run, P0, eta_prompts, eta_responses)


def long_round(run: Run, P0: int) -> list[Group]:
    """The queue's first P0, as soon as it has so many; whatever it has, once no other round remains."""
    return run.parked.pop(P0) if len(run.parked) >= P0 or run.overtime else []


def short_round(run: Run, P0: int, eta_prompts: float, eta_responses: float) -> list[Group]:
    return run.prompts(ceil(eta_prompts * P0), samples=ceil(eta_responses * run.group_size))
