"""Running a config in virtual time: the set-up of [sim], completed from the other sections."""

from rich.console import Console

from tailrace import clock
from tailrace.algo.advantages import ComputeAdvantages
from tailrace.commands.placement import sim_shared
from tailrace.config import RunConfig
from tailrace.controller.execution import execute
from tailrace.controller.simulation import simulated_parts
from tailrace.errors import ConfigError
from tailrace.record.events import Recorder
from tailrace.schedules.resolve import BoundSchedule
from tailrace.sim.cluster import rates
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, DEFAULT_MEDIAN_TOKENS, SimSettings
from tailrace.sim.world import law_of

OF_DEVICES = {
    "engines": ("count", "base_s", "slope_s", "context_s", "compute_s", "kv_tokens", "prefill_tokens_per_s"),
    "trainer": ("tokens_per_s", "step_s"),
}
"""Keys of [sim] that depend on the model and on the devices."""


def costs_given(sim: SimSettings) -> list[tuple[str, str]]:
    """Return the section and the key of each cost that the config gives."""
    return [
        (section, key)
        for section, keys in OF_DEVICES.items()
        for key in keys
        if key in getattr(sim, section).model_fields_set
    ]


def note_default_costs(sim: SimSettings, console: Console) -> None:
    """Say so if the figures are those of no model and of no machine."""
    costs = [key for _, key in costs_given(sim) if key != "count"]
    if not costs and sim.cluster is None:
        note = "note: the costs of engines and trainer are defaults; --like RUN takes those of a run"
        console.print(f"{note}, [sim.cluster] those of a model on devices", markup=False, soft_wrap=True)


def run_virtual(config: RunConfig, schedule: BoundSchedule, recorder: Recorder) -> float:
    """Run a schedule on simulated parts; return the virtual seconds that it took.

    Raises:
        ConfigError: [sim] cannot work.
    """
    sim = sim_settings(config)

    async def run() -> float:
        parts = simulated_parts(
            sim,
            config.run.seed,
            reference=config.algorithm.needs_reference,
            replicas=config.trainer.replicas,
            shared=sim_shared(config, sim),
        )
        advantages = ComputeAdvantages(config.algorithm, sim_max_tokens(config))
        await execute(schedule, parts, config.run, recorder, compute_advantages=advantages)
        return clock.now()

    return clock.run(run(), virtual=True)


def sim_settings(config: RunConfig) -> SimSettings:
    """[sim] of a config. What it leaves open follows from [sim.cluster], or is taken from [engine] and
    [sampling].

    Raises:
        ConfigError: [sim.cluster] cannot work, the placement is another one, or lengths cannot be read.
    """
    sim, kind = without_rates(config), config.placement.kind
    if cluster := sim.cluster:
        if (cluster.rollout_devices is None) == (kind == "disaggregated"):
            found = "all devices generate" if cluster.rollout_devices is None else "some devices only train"
            remedy = 'choose "disaggregated" with sim.cluster.rollout_devices, or another kind without it'
            raise ConfigError("placement.kind", kind, f"{found} in [sim.cluster]", remedy)
        sim = rates(sim)
    count = sim.engines.count or config.engine.num_engines
    return sim.model_copy(update={"engines": sim.engines.model_copy(update={"count": count})})


def without_rates(config: RunConfig) -> SimSettings:
    """[sim] of a config with what is taken from the other sections, before [sim.cluster] fills the rates.

    Raises:
        ConfigError: lengths cannot be read.
    """
    sim, lengths, cluster = config.sim, config.sim.lengths, config.sim.cluster
    law_of(lengths)
    max_tokens = sim_max_tokens(config)
    taken = 1.0 if lengths.max_tokens else max_tokens / DEFAULT_MAX_TOKENS
    median_tokens = lengths.median_tokens or DEFAULT_MEDIAN_TOKENS * taken
    slots = sim.engines.slots or config.engine.max_num_seqs
    synchronous = sim.rewards.synchronous or config.reward.synchronous
    if cluster and cluster.model is None and config.model:
        cluster = cluster.model_copy(update={"model": str(config.model.path)})
    changes = {
        "cluster": cluster,
        "rewards": sim.rewards.model_copy(update={"synchronous": synchronous}),
        "engines": sim.engines.model_copy(update={"slots": slots}),
        "lengths": lengths.model_copy(update={"max_tokens": max_tokens, "median_tokens": median_tokens}),
    }
    return sim.model_copy(update=changes)


def sim_max_tokens(config: RunConfig) -> int:
    """Length limit of a completion in virtual time."""
    limit = config.sampling.max_completion_tokens if config.sampling else DEFAULT_MAX_TOKENS
    return config.sim.lengths.max_tokens or limit
