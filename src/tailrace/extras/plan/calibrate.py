"""A cluster with the efficiencies of a run, so that other divisions of its devices can be planned."""

from tailrace.config import RunConfig
from tailrace.drivers.assembly.simulation import without_rates
from tailrace.errors import ConfigError
from tailrace.extras.plan.candidates import Workload, response_lengths
from tailrace.extras.plan.plan import generation_seconds
from tailrace.sim.cluster import rates
from tailrace.sim.settings import SimClusterSettings, SimEngineSettings, SimSettings, SimTrainerSettings

DECODING = ("bandwidth_efficiency", "decode_efficiency", "prefill_efficiency")
OVERHEADS = ("overhead_s", "overhead_per_request_s")
NUM_STEPS = 64
"""Optimizer steps whose prompts give the lengths of the responses of a step."""
PASSES = 8
"""Passes until the efficiencies stay: links are not scaled, and an optimizer step reads memory, too."""


def calibrated(
    config: RunConfig,
    fitted: SimSettings,
    groups_per_step: int,
    training_s: float | None,
    streams: bool,
    others_s: float = 0.0,
) -> RunConfig:
    """The config with a run's lengths and rewards, with the efficiencies of [sim.cluster] at which its
    engines and trainer take as long as in the run, and with update_s where the run tells it from the passes.
    The division of the devices and other costs are left open. Raises a ConfigError if no efficiency explains
    the run.

    Args:
        fitted: the costs of the run on the devices of the cluster, divided as they are there.
        training_s: seconds in which it trains a step; None: they follow from the costs.
        streams: it does not wait for the longest response of a step.
        others_s: of an optimizer step in `fitted`, the seconds that are no part of its training.
    """
    sim, cluster = config.sim, config.sim.cluster
    if cluster is None:
        remedy = "add [sim.cluster] with the device, the number of devices and the model of the run"
        raise ConfigError("sim.cluster", None, "the planner needs the section", remedy)
    engines = SimEngineSettings(slots=sim.engines.slots or config.engine.max_num_seqs)
    of_run = {"lengths": fitted.lengths, "rewards": fitted.rewards}
    sim = sim.changed(**of_run, engines=engines, trainer=SimTrainerSettings())
    size, prompts = config.run.group_size, range(NUM_STEPS * groups_per_step)
    lengths = response_lengths(sim, size, prompts, config.run.seed)
    load, samples = Workload(lengths, sim.lengths.prompt_tokens), groups_per_step * size
    steps = load.mean_tokens if streams else load.longest(groups_per_step)
    passes_s = load.passes_s(fitted.trainer, samples)
    constant_s = fitted.trainer.pass_s + fitted.trainer.step_s - others_s
    if training_s is None:
        training_s = passes_s + constant_s + others_s
    given = {"count": config.engine.num_engines, "slots": engines.slots}
    given = {key: value for key, value in given.items() if getattr(fitted.engines, key) is None}
    wanted_s = generation_seconds(fitted.engines.changed(**given), load, samples, steps)
    if constant_s > 0:  # the updates of the run told it from the passes
        cluster = cluster.changed(update_s=0.0)
    for _ in range(PASSES):
        config = config.changed(sim=sim.changed(cluster=cluster))
        computed = rates(without_rates(config))
        slower = wanted_s / generation_seconds(computed.engines, load, samples, steps)
        changes = {key: getattr(cluster, key) / slower for key in DECODING}
        costs = {key: getattr(cluster, key) * slower for key in OVERHEADS}
        step_s = computed.trainer.step_s
        if constant_s > 0:
            costs["update_s"] = max(0.0, constant_s - step_s + (before_s := cluster.update_s or 0.0))
            step_s += costs["update_s"] - before_s
        faster = load.passes_s(computed.trainer, samples) / max(1e-9, training_s - step_s)
        changes["training_efficiency"] = cluster.training_efficiency * faster
        cluster = cluster.changed(**changes | costs)
    for key, value in changes.items():
        if value > 1:
            problem = "the run is faster than these devices could be with this model"
            remedy = "name the device, the devices and the model of the run in [sim.cluster]"
            raise ConfigError(f"sim.cluster.{key}", round(value, 3), problem, remedy)
    kept = cluster.model_dump(exclude_unset=True, exclude={"rollout_devices", "tensor_parallel"})
    return config.changed(sim=sim.changed(cluster=SimClusterSettings(**kept)))
