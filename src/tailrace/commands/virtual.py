"""Running a config in virtual time: the set-up of [sim], completed from the other sections."""

from tailrace import clock
from tailrace.algo.compute_advantages import ComputeAdvantages
from tailrace.commands.placement import sim_shared
from tailrace.config import RunConfig
from tailrace.controller.execution import execute
from tailrace.controller.simulation import simulated_parts
from tailrace.record.events import Recorder
from tailrace.schedules.resolve import BoundSchedule
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, DEFAULT_MEDIAN_TOKENS, SimSettings


def run_virtual(config: RunConfig, schedule: BoundSchedule, recorder: Recorder) -> float:
    """Run a schedule on simulated parts; return the virtual seconds that it took."""

    async def run() -> float:
        sim = sim_settings(config)
        parts = simulated_parts(
            sim,
            config.run.seed,
            reference=config.algorithm.needs_reference,
            replicas=config.trainer.replicas,
            shared=sim_shared(config),
        )
        advantages = ComputeAdvantages(config.algorithm, sim_max_tokens(config))
        await execute(schedule, parts, config.run, recorder, compute_advantages=advantages)
        return clock.now()

    return clock.run(run(), virtual=True)


def sim_settings(config: RunConfig) -> SimSettings:
    """[sim] of a config. What it leaves open is taken from [engine] and [sampling]."""
    engines, lengths = config.sim.engines, config.sim.lengths
    max_tokens = sim_max_tokens(config)
    taken = 1.0 if lengths.max_tokens else max_tokens / DEFAULT_MAX_TOKENS
    count = engines.count or config.engine.num_engines
    slots = engines.slots or config.engine.max_num_seqs
    median_tokens = lengths.median_tokens or DEFAULT_MEDIAN_TOKENS * taken
    rewards = config.sim.rewards.model_copy(
        update={"synchronous": config.sim.rewards.synchronous or config.reward.synchronous}
    )
    changes = {
        "rewards": rewards,
        "engines": engines.model_copy(update={"count": count, "slots": slots}),
        "lengths": lengths.model_copy(update={"max_tokens": max_tokens, "median_tokens": median_tokens}),
    }
    return config.sim.model_copy(update=changes)


def sim_max_tokens(config: RunConfig) -> int:
    """Length limit of a completion in virtual time."""
    limit = config.sampling.max_completion_tokens if config.sampling else DEFAULT_MAX_TOKENS
    return config.sim.lengths.max_tokens or limit
