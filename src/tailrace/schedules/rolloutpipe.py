"""RolloutPipe (Chen et al. 2026): complete-group pipelining and frontier-group dispatch. Algorithm 1.

    lines 8-12   FGD_ADMIT        run.pool.admission: Frontier as printed, FrontierFirst, AtMost
    lines 13-15  ROLLOUT_WORKER   the pool: generate, score, filter, advantages
    lines 16-19  CGP_HANDOFF      run.pool.take, feasible
    lines 20-23  TRAIN            accumulate; step at U groups; publish when all R groups are consumed

All groups of a round are generated with the round's weights, and the old policy of every step is the round's
published policy. Compared with `serial`, only the order and the time of training change.
"""

from sys import maxsize

from tailrace.controller.run import Run
from tailrace.rollout.admission import FIFO, Admission, Frontier, feasible, fits
from tailrace.rollout.order import probe_first
from tailrace.schedules.parameters import Count, require, require_divisible


async def rolloutpipe(
    run: Run,
    groups_per_round: Count,
    groups_per_step: Count,
    max_tokens_per_batch: Count = 65_536,
    admission: Admission = FIFO,
) -> None:
    """The first complete groups are trained while later groups are generated.

    Args:
        groups_per_round: groups of a rollout (R).
        groups_per_step: complete groups of an optimizer step (U = B/K).
        max_tokens_per_batch: tokens, prompts included, that a replica of the trainer gets at once (4).
        admission: which requests may be served: kind "at_most", "frontier" or "frontier_first".
    """
    require_divisible(groups_per_round, groups_per_step)
    require_whole_groups(run, admission)
    run.declare(staleness=0)
    run.pool.admission = admission
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_per_round))
        for _ in range(groups_per_round // groups_per_step):
            groups = await run.pool.take(groups_per_step)
            for batch in feasible(groups, max_tokens_per_batch, run.trainer_replicas):
                await run.accumulate(batch)
            await run.step()
        await run.publish()


async def rolloutpipe_eager(
    run: Run,
    groups_per_round: Count,
    groups_per_step: Count,
    max_tokens_per_batch: Count = 65_536,
    admission: Admission = FIFO,
) -> None:
    """Ours: a complete group is accumulated at once. The optimizer steps at the same groups as `rolloutpipe`.

    Args:
        groups_per_round, groups_per_step, max_tokens_per_batch, admission: as in rolloutpipe.
    """
    require_divisible(groups_per_round, groups_per_step)
    require_whole_groups(run, admission)
    run.declare(staleness=0)
    run.pool.admission = admission
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_per_round))
        for _ in range(groups_per_round // groups_per_step):
            select = fits(max_tokens_per_batch, run.trainer_replicas)
            async for batch in run.pool.stream(groups_per_step, select):
                await run.accumulate(batch)
            await run.step()
        await run.publish()


async def periodic_asynchrony(run: Run, groups_per_round: Count) -> None:
    """Periodic Asynchrony (Lu 2025, arXiv 2511.18871): `rolloutpipe_eager` with one optimizer step a round.

    The paper's other parts, one model for policy, old policy and reference and attention that shares the
    prompt of a group, belong to a trainer.

    Args:
        groups_per_round: groups of an iteration, and of its optimizer step.
    """
    await rolloutpipe_eager(run, groups_per_round, groups_per_round, max_tokens_per_batch=maxsize)


def require_whole_groups(run: Run, admission: Admission) -> None:
    """Raise a ConfigError if no group of a frontier could become complete."""
    stuck = isinstance(admission, Frontier) and run.pool.order is probe_first
    problem = "a frontier waits for the other samples of its groups, and they come after all probes"
    require(
        not stuck, "order", "probe_first", problem, "remove it, or choose admission.kind = frontier_first"
    )
