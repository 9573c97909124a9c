"""tailrace: our own schedules.

`tailrace` takes up APRIL (Zhou et al. 2025, 2.2) and PipelineRL (Piche et al. 2025, 4) without their waits.
`tailrace_on_policy` takes up SortedRL (Zhang et al. 2026, arXiv 2603.23414) and the race of RollPacker (Gao
et al. 2025, 3): what is known of the lengths decides who races.
"""

from functools import partial
from math import ceil

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Bound, Count, Factor, KVRule
from tailrace.schedules.sortedrl import rest_of_batch
from tailrace.schedules.window import in_flight
from tailrace.types import Group, Stale


async def tailrace(
    run: Run,
    groups_per_step: Count,
    groups_in_flight: Count,
    staleness: Bound,
    stale: Stale = "wait",
    kv: KVRule = "keep",
    verify_max_cuts: Count = 4,
) -> None:
    """APRIL without the stop: generation never ends, and the weights change in flight.

    Groups are accumulated as they complete. After every step the pool is filled up again. The selection keeps
    the bound on staleness; no token is thrown away for it.

    Args:
        groups_per_step: groups of an optimizer step (U = B/K).
        groups_in_flight: groups in the pool; with "wait" at most (staleness + 1) * groups_per_step, with
            "verify" (verify_max_cuts + 1) * groups_per_step.
        staleness: bound on the age of a trained token, in publications.
        stale: "wait": the trainer waits for the groups that are due. "mask": it trains a sample when that
            ends, and masks tokens that are too old. "verify": the newest weights draw older tokens again
            with the same noise, and what differs is generated anew.
        kv: as in pipelinerl; with "verify" it is "recompute".
        verify_max_cuts: versions that may change a group; it is trained before more do.
    """
    flight = partial(in_flight, max_cuts=verify_max_cuts, publish=partial(run.publish, kv=kv))
    await flight(run, groups_per_step, groups_in_flight, staleness, stale=stale)


async def tailrace_on_policy(
    run: Run, groups_per_round: Count, prompt_speculation: Factor = 2.0, rounds_sorted: Count = 8
) -> None:
    """Races of the prompts that are probably the shortest; the losers race again.

    The prompts of several rounds are drawn at once and trained from short to long. What is known of a prompt
    is the longest response to its row when it was last trained, and how many tokens it had when it lost a
    race. All K responses of a prompt are trained, and a restarted prompt has the same noise as before (not on
    vLLM), so the lengths of a run are not biased. Those of a single step are.

    Args:
        groups_per_round: groups trained in a round (N).
        prompt_speculation: groups launched in a race, as a multiple of N (eta). 1: no race.
        rounds_sorted: rounds whose prompts are drawn at once. After the last round of the run, there are
            rounds until all are trained.
    """
    run.declare(staleness=0)
    async for _ in run.rounds(while_parked=True):
        if not len(run.parked):
            run.defer(rest_of_batch(run, rounds_sorted * groups_per_round, groups_per_round))
        groups = shortest(run, ceil(prompt_speculation * groups_per_round))
        run.pool.launch(groups)
        async for batch in run.pool.race(min(groups_per_round, len(groups)), scored=True):
            await run.accumulate(batch)
        await run.step()
        await run.publish()


def shortest(run: Run, n: int) -> list[Group]:
    """The first n parked groups in the order of what is known of their lengths, without their tokens."""

    def known_tokens(group: Group) -> int:
        return max([run.history.predicted(group.prompt), *(sample.num_tokens for sample in group.samples)])

    run.parked.groups.sort(key=known_tokens)
    groups = run.parked.pop(n)
    run.restart([group for group in groups if group.oldest_version is not None])
    return groups
