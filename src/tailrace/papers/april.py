"""APRIL (Zhou et al. 2025): the rollout throughput of its twelve settings, Table 1.

The paper leaves open how its baseline samples under DAPO's filter and what its throughput counts. Both are
read from the published code (RLsys-Foundation/APRIL, slime/rollout/sglang_example.py and
backends/megatron_utils/data.py, September 2025):

    dynamic sampling    whenever fewer than N groups are alive (running or passed by the filter), a batch of
                        `over_sampling_batch_size` prompts is drawn: 64 with APRIL, and N = 32 without, the
                        default
    end of a rollout    at the N-th group that passes; without APRIL everything that is unfinished is
                        discarded
    throughput          tokens that engines generated in the rollout, those of filtered and discarded groups
                        included, over the time of the rollout
    carried tokens      tokens of resumed responses at their resumption, over the same and the tokens
                        generated (`off_policy_ratio`)
"""

from dataclasses import dataclass
from functools import cache, partial
from math import inf
from statistics import fmean

from tailrace.algo.base import AlgorithmSettings
from tailrace.algo.compute_advantages import GRPO, ComputeAdvantages
from tailrace.controller.base import RunSettings
from tailrace.controller.run import Run
from tailrace.papers.base import Figure, Paper, Table
from tailrace.papers.runs import Schedule, Simulated, simulate
from tailrace.record.events import Event, RequestEnded, RequestStarted
from tailrace.rollout.placement import Shared
from tailrace.schedules.april import april
from tailrace.schedules.serial import serial
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)
from tailrace.types import Group

N, LAUNCHED, K = 32, 64, 8
MAX_TOKENS = 16_384
ROUNDS, WARM_UP = 24, 6


async def oversample_and_discard(run: Run, groups_per_round: int, groups_per_draw: int) -> None:
    """The baseline under dynamic sampling: prompts are drawn in batches, and what has not passed at the end of
    the rollout is discarded.

    Args:
        groups_per_round: groups trained in a round (N).
        groups_per_draw: groups of a batch.
    """
    run.promise(staleness=0)
    async for _ in run.rounds():
        batch = await _passed(run, groups_per_round, groups_per_draw)
        run.drop(run.parked.pop(len(run.parked)), "discarded")
        await run.train(batch)
        await run.publish(kv="recompute")


async def resample_and_resume(run: Run, groups_per_round: int, groups_per_draw: int) -> None:
    """APRIL under dynamic sampling: the same, and unfinished groups are first in the next batch.

    Args:
        groups_per_round: groups trained in a round (N).
        groups_per_draw: groups of a batch (N').
    """
    run.promise(staleness=inf)
    async for _ in run.rounds():
        await run.train(await _passed(run, groups_per_round, groups_per_draw))
        await run.publish(kv="recompute")


async def _passed(run: Run, num_groups: int, groups_per_draw: int) -> list[Group]:
    """The first groups that pass the filter. All others are parked."""
    run.pool.feed(run.prompts, room=0, full="block")  # no room: filtered groups are not replaced one by one
    while len(run.pool.ready) < num_groups:
        if len(run.pool) < num_groups:
            groups = run.parked.pop(groups_per_draw)
            run.pool.launch(groups + run.prompts(groups_per_draw - len(groups)))
        else:
            await run.pool.ready.changed.wait("groups that pass the filter")
    batch = await run.pool.take(num_groups)
    await run.pool.park()
    return batch
