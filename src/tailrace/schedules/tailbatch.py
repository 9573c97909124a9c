"""RollPacker (Gao et al. 2025): tail batching, section 3; the stream trainer, section 4.4.

A short round is a race: the first P0 prompts to finish, with the first R0 responses of each. The prompts that
lose join the long-prompt queue (`run.parked`). When the queue holds P0 prompts, they have a long round
without a race. Both kinds are on-policy: a deferred prompt starts again from nothing. After the last round
the rest of the queue has a round, too, so no prompt is left out. R0 is K, the group size of the run.
"""

from functools import partial
from math import ceil, inf

from tailrace.controller.run import Run
from tailrace.rollout.admission import AtMost
from tailrace.schedules.parameters import Count, Factor
from tailrace.types import Group


async def tailbatch(
    run: Run,
    groups_per_round: Count,
    prompt_speculation: Factor = 1.25,
    response_speculation: Factor = 1.25,
) -> None:
    """Short rounds and long rounds, with one optimizer step each.

    Args:
        groups_per_round: prompts trained in a round (P0).
        prompt_speculation: prompts launched in a short round, as a multiple of P0 (eta). 1: no race.
        response_speculation: responses launched for each prompt, as a multiple of R0 (eta). 1: no race.
    """
    run.declare(staleness=0)
    async for _ in run.rounds(while_parked=True):
        groups = next_round(run, groups_per_round, prompt_speculation, response_speculation)
        run.pool.launch(groups)
        await run.train(await winners(run, min(groups_per_round, len(groups))))
        await run.publish()


async def rollpacker(
    run: Run,
    groups_per_round: Count,
    prompt_speculation: Factor = 1.25,
    response_speculation: Factor = 1.25,
) -> None:
    """Tail batching with the stream trainer (Algorithm 1, line 23): complete groups are accumulated while the
    rollout goes on, and the optimizer steps at its end.

    Args:
        groups_per_round, prompt_speculation, response_speculation: as in tailbatch.
    """
    run.declare(staleness=0)
    async for _ in run.rounds(while_parked=True):
        groups = next_round(run, groups_per_round, prompt_speculation, response_speculation)
        run.pool.launch(groups)
        async for batch in run.pool.race(min(groups_per_round, len(groups))):
            await run.accumulate(batch)
        await run.step()
        await run.publish()


async def tailbatch_dapo(
    run: Run,
    groups_per_round: Count,
    requests_per_engine: Count,
    response_speculation: Factor = 1.25,
) -> None:
    """Tail batching with DAPO's dynamic sampling (section 7): prompts are drawn until P0 groups pass the
    filter. Filtered prompts do not join the queue. The round ends when P0 groups are scored, because the
    filter needs rewards.

    Args:
        groups_per_round: prompts trained in a round (P0).
        requests_per_engine: requests in service on each engine.
        response_speculation: responses launched for each prompt, as a multiple of R0 (eta). 1: no race.
    """
    run.declare(staleness=0)
    run.pool.admission = AtMost(requests_per_engine=requests_per_engine)
    num_samples = ceil(response_speculation * run.group_size)
    async for _ in run.rounds(while_parked=True):
        if long := long_round(run, groups_per_round):
            run.pool.launch(run.restart(long))
        else:
            run.pool.feed(partial(run.prompts, samples=num_samples), room=inf, full="block")
        batch = await run.pool.take(len(long) or groups_per_round)
        await run.pool.park()
        await run.train(batch)
        await run.publish()


async def tailbatch_async(
    run: Run,
    groups_per_round: Count,
    prompt_speculation: Factor = 1.25,
    response_speculation: Factor = 1.25,
) -> None:
    """Off-policy: queued prompts continue from their tokens instead of from nothing. No bound on staleness.

    Args:
        groups_per_round, prompt_speculation, response_speculation: as in tailbatch.
    """
    run.declare(staleness=inf)
    async for _ in run.rounds(while_parked=True):
        groups = long_round(run, groups_per_round) or short_round(
            run, groups_per_round, prompt_speculation, response_speculation
        )
        run.pool.launch(groups)
        await run.train(await winners(run, min(groups_per_round, len(groups))))
        await run.publish()


async def winners(run: Run, n: int) -> list[Group]:
    """The groups that win the race, all at once."""
    return [group async for groups in run.pool.race(n) for group in groups]


def next_round(run: Run, n: int, prompt_speculation: float, response_speculation: float) -> list[Group]:
    return run.restart(long_round(run, n)) or short_round(run, n, prompt_speculation, response_speculation)


def long_round(run: Run, n: int) -> list[Group]:
    """The first n groups of the queue if it has so many; after the last round, what it has."""
    return run.parked.pop(n) if len(run.parked) >= n or run.overtime else []


def short_round(run: Run, n: int, prompt_speculation: float, response_speculation: float) -> list[Group]:
    return run.prompts(ceil(prompt_speculation * n), samples=ceil(response_speculation * run.group_size))
