"""Frontier-group dispatch at the printed width, and at the one that follows from rates, on set-ups that are
not fitted."""

from collections.abc import Mapping
from functools import partial

from reproductions.base import Figure, Table
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.simulation import simulate
from tailrace.extras.plan.candidates import Workload, response_lengths
from tailrace.rollout.admission import AtMost, Frontier
from tailrace.schedules.rolloutpipe import rolloutpipe
from tailrace.sim.cluster import rates
from tailrace.sim.engine import Steps
from tailrace.sim.settings import SimSettings

R, K, U = 48, 8, 2
LOADS = (0.8, 1.5, 2.5)
"""Time of the training of a round over that of its generation with all slots in use."""
A100 = {"device": "A100-40G", "devices": 4, "rollout_devices": 2, "tensor_parallel": 2, "model": "Qwen3-1.7B"}
H100 = {"device": "H100", "devices": 4, "rollout_devices": 2, "model": "Qwen2.5-7B"}
BASE_S, SLOTS = 6e-3, 128
GROWTH = (2, 8)
"""Factors by which SLOTS requests add to the decode step of one."""
SECTIONS = {
    "lengths": {"median_tokens": 1000.0, "sigma": 0.8, "correlation": 0.5, "max_tokens": 8192},
    "rewards": {"median_s": 0.1, "workers": 1024},
}


def set_ups() -> Mapping[str, SimSettings]:
    """Devices with the rates of their profiles, and engines whose decode steps grow with their requests."""
    found: dict[str, dict[str, object]] = {
        f"{cluster['rollout_devices']} {cluster['device']}, {cluster['model']}, {slots} slots": {
            "cluster": cluster,
            "engines": {"slots": slots, "load_s": 0.0},
        }
        for cluster, slots in ((A100, 32), (A100, SLOTS), (H100, SLOTS))
    }
    for growth in GROWTH:
        slope_s = growth * BASE_S / SLOTS
        engines = {"count": 1, "slots": SLOTS, "base_s": BASE_S, "slope_s": slope_s, "load_s": 0.0}
        found[f"{SLOTS} requests: {1 + growth} times the step of one"] = {"engines": engines}
    return {row: rates(SimSettings.model_validate(SECTIONS | each)) for row, each in found.items()}


def loaded(sim: SimSettings, load: Workload, ratio: float) -> SimSettings:
    """The set-up with a trainer that needs `ratio` times as long for a round as the generation."""
    count, slots = sim.engines.count or 1, sim.engines.slots or 1
    step_s = Steps.of(sim.engines, slots, int(slots * load.mean_context)).first_s
    per_token = (load.mean_tokens + load.prompt_tokens) / load.mean_tokens
    trainer = {"tokens_per_s": count * slots / step_s * per_token / ratio, "step_s": 0.0}
    return sim.changed(trainer=trainer)


def widths(seed: int) -> Table:
    """Section 3.3: main time against FIFO admission."""
    figures = []
    for row, rated in set_ups().items():
        prompt_tokens = rated.lengths.prompt_tokens
        load = Workload(response_lengths(rated, K, range(2 * R), seed), prompt_tokens)
        for ratio in LOADS:
            sim, case = loaded(rated, load, ratio), f"{row}; training {ratio:g} times as long"
            chosen = load.frontier_width(sim, R, U)
            fifo_s, printed_s, chosen_s = (
                simulate(
                    partial(rolloutpipe, groups_per_round=R, groups_per_step=U, admission=admission),
                    sim.changed(cluster=None),
                    RunSettings(rounds=2, group_size=K, seed=seed),
                ).figures["main_time_s"]
                for admission in (AtMost(), Frontier(groups=U), Frontier(groups=chosen))
            )
            figures += [
                Figure(case, "F_w = U, more main time", "%", None, 100 * (printed_s / fifo_s - 1)),
                Figure(case, "F_w from rates", "groups", None, chosen),
                Figure(case, "F_w from rates, more main time", "%", None, 100 * (chosen_s / fifo_s - 1)),
            ]
    notes = (
        f"R = {R}, K = {K}, U = {U}; more main time than with FIFO, which is a width of {R} groups. The width"
        " from rates is `frontier_width` of tailrace.extras.plan.candidates; nothing is fitted.",
        "F_w = U leaves slots free and lengthens each round. A frontier gains where a step grows nearly"
        " as its requests do and training takes longer than generation.",
    )
    return Table("Section 3.3", "frontier-group dispatch, set-ups that are not fitted", tuple(figures), notes)
