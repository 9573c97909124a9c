"""A simulated run: [sim] completed from the other sections, its parts, and a schedule run to its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tailrace import clock
from tailrace.algo.advantages import GRPO, ComputeAdvantages
from tailrace.config import RunConfig
from tailrace.contracts.sampling import SamplingSettings
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.execution import execute
from tailrace.drivers.assembly.folder import recorder_of
from tailrace.drivers.assembly.placement import device_sharing, prices_of
from tailrace.drivers.assembly.simulated import failure_limit, simulated_parts
from tailrace.errors import ConfigError
from tailrace.ledger.prices import Prices
from tailrace.record.events import Recorder, Row, Sink
from tailrace.record.figures import rounds_of, steps_of
from tailrace.record.summary import Summary
from tailrace.rollout.placement import DISAGGREGATED, DeviceSharing
from tailrace.schedules import Schedule
from tailrace.sim.cluster import rates
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, DEFAULT_MEDIAN_TOKENS, SimSettings
from tailrace.sim.world import law_of

OF_DEVICES = {
    "engines": (
        *("count", "base_s", "slope_s", "context_s", "compute_s", "kv_tokens", "prefill_tokens_per_s"),
        *("verify_positions", "overhead_per_request_s"),
    ),
    "trainer": ("tokens_per_s", "attention_s", "step_s", "swap_s", "early_swap_s"),
}
"""Keys of [sim] that depend on the model and on the devices."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """Results of a run in virtual time.

    Args:
        steps: a row for each optimizer step, those of the warm-up included.
        rounds: a row for each round that trained, those of the warm-up included.
        figures: those of the rounds after the warm-up.
        over_bound: time of the whole run over its lower bound (record/bounds.py), minus 1.
        seconds: virtual time from the start of the run to its end.
    """

    steps: Sequence[Row]
    rounds: Sequence[Row]
    figures: Row
    over_bound: float
    seconds: float


def simulate(
    schedule: Schedule,
    sim: SimSettings,
    settings: RunSettings,
    *,
    sharing: DeviceSharing = DISAGGREGATED,
    replicas: int = 1,
    reference: bool = False,
    prices: Prices | None = None,
    warm_up_rounds: int = 0,
    sinks: Sequence[Sink] = (),
    parts: Callable[[], RunComponents] | None = None,
    compute_advantages: ComputeAdvantages = GRPO,
) -> Simulated:
    """Run a schedule to its end in virtual time.

    Args:
        sharing, replicas, reference, prices: as in `simulated_parts`.
        warm_up_rounds: first rounds that `figures` does not count.
        sinks: receive every event and row, too.
        parts: makes the parts inside the virtual loop, where a paper needs other ones than `sim` describes.
            `sim` and the arguments of `simulated_parts` are not used then.
        compute_advantages: as `execute`.
    """
    summary = Summary()
    make = partial(simulated_parts, rates(sim), settings.seed, reference=reference, replicas=replicas)
    parts = parts or partial(make, sharing=sharing, prices=prices)
    recorder = recorder_of(None, summary, *sinks)
    seconds = _executed(schedule, parts, settings, recorder, compute_advantages)
    bound = summary.bound
    over_bound = bound.run_time_s / bound.run_bound_s - 1.0 if bound and bound.run_bound_s else 0.0
    figures = summary.figures(warm_up_rounds)
    return Simulated(steps_of(summary.rows), rounds_of(summary.rows), figures, over_bound, seconds)


def _executed(
    schedule: Schedule,
    parts: Callable[[], RunComponents],
    settings: RunSettings,
    recorder: Recorder,
    compute_advantages: ComputeAdvantages,
) -> float:
    """Return the virtual seconds that a run took."""

    async def run() -> float:
        await execute(schedule, parts(), settings, recorder, compute_advantages=compute_advantages)
        return clock.now()

    return clock.run(run(), virtual=True)


def costs_given(sim: SimSettings) -> list[tuple[str, str]]:
    """Return the section and the key of each cost that the config gives."""
    costs = [(section, key) for section, keys in OF_DEVICES.items() for key in keys]
    return [(section, key) for section, key in costs if key in getattr(sim, section).model_fields_set]


def sources(config: RunConfig, like: object = None) -> str:
    """Say in a sentence where lengths and costs of a simulation come from. `like`: the run that [sim] is
    fitted to."""
    sim, law, lengths = config.sim, config.sim.lengths.distribution, "a default distribution of no model"
    if law or sim.lengths.median_tokens:
        recorded = getattr(law, "path", None)
        lengths = f"recorded in {recorded}" if recorded else "those of [sim.lengths]"
    if cluster := sim.cluster:
        model = cluster.model or (config.model and config.model.path)
        costs = f"computed for {model} on {cluster.devices} x {cluster.device}"
    elif like or any(key != "count" for _, key in costs_given(sim)):
        costs = f"fitted to {like}" if like else "those of [sim]"
    else:
        costs = "defaults of no machine; --like RUN takes those of a run, [sim.cluster] costs of devices"
    return f"Lengths are {lengths}, costs are {costs}."


def run_virtual(config: RunConfig, schedule: Schedule, recorder: Recorder) -> float:
    """Run a schedule on simulated parts; return the virtual seconds that it took. Raises a ConfigError if
    [sim] cannot work."""
    sim, deadline_s = sim_settings(config), config.run.groups.deadline_s
    if deadline_s and deadline_s < sim.engines.base_s:
        problem = f"no sample can meet it: a decode step takes {sim.engines.base_s:g} s"
        raise ConfigError("run.groups.deadline_s", deadline_s, problem, "raise it")
    parts = partial(
        simulated_parts,
        sim,
        config.run.seed,
        max_failures=failure_limit(config, schedule),
        reference=config.algorithm.needs_reference,
        replicas=config.trainer.replicas,
        sharing=device_sharing(config, sim),
        prices=prices_of(config, sim),
        pools=config.data.pools if config.data else None,
    )
    advantages = ComputeAdvantages(config.algorithm, sim_sampling(config))
    return _executed(schedule, parts, config.run, recorder, advantages)


def sim_settings(config: RunConfig) -> SimSettings:
    """[sim] of a config. What it leaves open follows from [sim.cluster], or is taken from [engine] and
    [sampling]. Raises a ConfigError if [sim.cluster] cannot work, the placement is another one, or lengths
    cannot be read."""
    sim, placement = without_rates(config), config.placement
    if cluster := sim.cluster:
        if (cluster.rollout_devices is None) != placement.takes_turns:
            found = "all devices generate" if cluster.rollout_devices is None else "some devices only train"
            remedy = 'choose "disaggregated" with sim.cluster.rollout_devices, or another kind without it'
            raise ConfigError("placement.kind", placement.kind, f"{found} in [sim.cluster]", remedy)
        sim = rates(sim)
    count = sim.engines.count or config.engine.num_engines
    return sim.changed(engines={"count": count})


def without_rates(config: RunConfig) -> SimSettings:
    """[sim] of a config with what is taken from the other sections, before [sim.cluster] fills the rates.
    Raises a ConfigError if lengths cannot be read."""
    sim, lengths, cluster = config.sim, config.sim.lengths, config.sim.cluster
    law_of(lengths)
    max_tokens = sim_sampling(config).max_completion_tokens
    taken = 1.0 if lengths.max_tokens else max_tokens / DEFAULT_MAX_TOKENS
    median_tokens = lengths.median_tokens or DEFAULT_MEDIAN_TOKENS * taken
    slots = sim.engines.slots or config.engine.max_num_seqs
    synchronous = sim.rewards.synchronous or config.reward.synchronous
    if cluster:
        given = {"offload": config.trainer.offload, "trainer_replicas": config.trainer.replicas}
        given |= {"trainer_tensor_parallel": config.trainer.tensor_parallel}
        given |= {"model": str(config.model.path)} if config.model else {}
        given |= {"weight_groups": getattr(config.weights, "groups", None)}
        cluster = cluster.changed(**{k: v for k, v in given.items() if getattr(cluster, k) is None})
    return sim.changed(
        cluster=cluster,
        rewards={"synchronous": synchronous},
        engines={"slots": slots, "versions": sim.engines.versions or config.num_versions},
        lengths={"max_tokens": max_tokens, "median_tokens": median_tokens},
    )


def sim_sampling(config: RunConfig) -> SamplingSettings:
    """[sampling] with the length limit of a completion in virtual time."""
    given = config.sampling or SamplingSettings(max_completion_tokens=DEFAULT_MAX_TOKENS)
    limit = config.sim.lengths.max_tokens or given.max_completion_tokens
    return given.changed(max_completion_tokens=limit)
