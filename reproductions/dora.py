"""DORA (Hu et al. 2026, arXiv 2604.26256), section 5.2: the step of four paradigms on 64 and 128 H800.

The costs of an optimizer step and of a decode step are fitted: to four printed training times, and to the
synchronous rows, which wait for the longest response. Other rates are the simulator's defaults.
"""

from collections.abc import Mapping
from functools import cache, partial
from statistics import median
from typing import NamedTuple

from reproductions.base import Figure, Kind, Paper, Table, parameters
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.simulation import simulate
from tailrace.rollout.placement import DeviceSharing
from tailrace.schedules import Schedule
from tailrace.schedules.april import april
from tailrace.schedules.dora import dora
from tailrace.schedules.one_step_off import one_step_off
from tailrace.schedules.serial import serial
from tailrace.sim.cluster import rates
from tailrace.sim.settings import SimSettings

K, GROUPS, UPDATES, VERSIONS = 16, 512, 16, 3
"""Responses of a prompt; prompts and optimizer steps of a training step; versions at a time (K)."""
ALIVE = GROUPS * 3 // 2
"""Prompts in flight of DORA and of partial rollout (RBS)."""
MEDIAN, MEAN, LONGEST, PROMPT = 1045.0, 2400, 30_720, 150
"""Of the lengths, and the prompts: with sigma 1.3 the mean is the printed one."""
ROUNDS, WARM_UP_ROUNDS, SYNC_ROUNDS = 5, 2, 2
TRAINING_EFFICIENCY, UPDATE_S, OVERHEAD_S = 0.30, 6.3, 13e-3
"""Fitted. Printed training times are 319 / n + 2.98 min on n devices, to 0.7%: 11.2 s for each of 16
optimizer steps, of which links take 4.9 s."""


class Row(NamedTuple):
    """A bar of Fig. 8: minutes of a step, and the share of it in which nothing trains; devices that generate,
    if they do not train."""

    name: str
    devices: int
    minutes: float
    rollout_only: float | None
    generating: int | None = None

    def __str__(self) -> str:
        return f"{self.devices} H800, {self.name}"


SYNC = (Row("synchronous", 64, 22.91, 0.65), Row("synchronous", 128, 20.23, 0.73))
ROWS = (
    SYNC[0],
    Row("one-step off-policy", 64, 22.94, 0.33, 32),
    Row("partial rollout", 64, 17.38, 0.46),
    Row("DORA", 64, 14.67, 0.12, 32),
    SYNC[1],
    Row("one-step off-policy", 128, 14.0, None, 64),
    Row("partial rollout", 128, 13.95, None),
    Row("DORA", 128, 10.46, 0.24, 64),
)
TRAINED = ("synchronous", "DORA")
"""Paradigms whose training times the costs are fitted to."""
SEPARATE_UPDATES = ("synchronous", "one-step off-policy")
"""Paradigms whose schedules make each optimizer step; those of others make one a publication."""
SCHEDULES: Mapping[str, Schedule] = {
    "synchronous": partial(serial, groups_per_round=GROUPS, groups_per_step=GROUPS // UPDATES),
    "one-step off-policy": partial(one_step_off, groups_per_round=GROUPS, groups_per_step=GROUPS // UPDATES),
    "partial rollout": partial(april, groups_per_round=GROUPS, groups_launched=ALIVE),
    "DORA": partial(dora, groups_per_step=GROUPS, groups_in_flight=ALIVE, staleness=VERSIONS - 1),
}


def setup(row: Row, updates: int) -> SimSettings:
    """The costs of a row. `updates`: optimizer steps that one of its schedule stands for."""
    cluster = {"device": "H800", "model": "Qwen2.5-32B", "tensor_parallel": 4, "devices": row.devices}
    cluster |= {"rollout_devices": row.generating, "training_efficiency": TRAINING_EFFICIENCY}
    cluster |= {"update_s": UPDATE_S, "overhead_s": OVERHEAD_S}
    lengths = {"median_tokens": MEDIAN, "sigma": 1.3, "max_tokens": LONGEST, "prompt_tokens": PROMPT}
    rewards = {"median_s": 0.0, "workers": GROUPS * K}
    sections = {"cluster": cluster, "lengths": lengths, "rewards": rewards, "engines": {"slots": 1024}}
    found = rates(SimSettings.model_validate(sections))
    step_s = updates * found.trainer.step_s
    return found.changed(trainer={"step_s": step_s})


@cache
def measured(row: Row, seed: int) -> tuple[float, float]:
    """Minutes of a step, and those of them in which nothing trains."""
    sim = setup(row, 1 if row.name in SEPARATE_UPDATES else UPDATES)
    rounds, warm_up_rounds = (SYNC_ROUNDS, 0) if row in SYNC else (ROUNDS, WARM_UP_ROUNDS)
    figures = simulate(
        SCHEDULES[row.name],
        sim,
        RunSettings(rounds=rounds, group_size=K, seed=seed),
        sharing=DeviceSharing("disaggregated" if row.generating else "colocated"),
        warm_up_rounds=warm_up_rounds,
    ).figures
    minutes = GROUPS * K / figures["samples_per_s"] / 60
    return minutes, minutes - figures["trainer_compute_s"] / 60


def steps(seed: int) -> Table:
    """Fig. 8: minutes of a step, with the error, and the share in which nothing trains; DORA's speed-ups.

    DORA's rows are no predictions: the rule of its schedule was changed after they had been seen.
    """
    figures, errors = list[Figure](), list[float]()
    ours = {str(row): measured(row, seed) for row in ROWS}
    for row in ROWS:
        minutes, rollout_only = ours[str(row)]
        error = 100 * (minutes / row.minutes - 1)
        is_fitted = row.name in TRAINED
        errors += [] if is_fitted else [abs(error)]
        kind: Kind = "fitted" if is_fitted else "predicted"
        of_share: Kind = "determined" if is_fitted else "predicted"
        figures.append(Figure(str(row), "step", "min", row.minutes, minutes, kind, 0.1 * row.minutes))
        figures.append(Figure(str(row), "error of the step", "%", None, error))
        printed = None if row.rollout_only is None else 100 * row.rollout_only
        figures.append(Figure(str(row), "rollout only", "%", printed, 100 * rollout_only / minutes, of_share))
        if row.rollout_only is not None and is_fitted:
            trained = row.minutes * (1 - row.rollout_only)
            figures.append(Figure(str(row), "training", "min", trained, minutes - rollout_only, kind))
    figures.append(Figure("predicted rows", "median error", "%", 0.0, median(errors), "determined", 10.0))
    for devices in (64, 128):
        *others, own = (row for row in ROWS if row.devices == devices)
        for row in others:
            speed_up = ours[str(row)][0] / ours[str(own)][0]
            what, printed = f"DORA over {row.name}", row.minutes / own.minutes
            figures.append(Figure(f"{devices} H800", what, "x", printed, speed_up, "determined", 0.1))
    notes = tuple(april_and_dora(devices, ours) for devices in (64, 128))
    return Table("Fig. 8", "step of Qwen2.5-32B", tuple(figures), notes)


def april_and_dora(devices: int, ours: Mapping[str, tuple[float, float]]) -> str:
    """Say which of the two is ahead, in print and here."""
    _, _, partial_rollout, dora_row = (row for row in ROWS if row.devices == devices)
    printed = partial_rollout.minutes / dora_row.minutes
    here = ours[str(partial_rollout)][0] / ours[str(dora_row)][0]
    words = f"is {'ahead of' if here > 1 else 'behind'} it: {here:.2f}x. "
    verdict = "The order agrees." if here > 1 else "The order is the opposite, and its cause is not known."
    return (
        f"april and dora, {devices} H800: in print DORA is ahead of partial rollout, {printed:.2f}x; here it"
        f" {words}{verdict}"
    )


PARAMETERS = """
printed 8 | 512 prompts of 16 responses a step, 16 optimizer steps, mean length 2.4K, at most 30K, K = 3, two
    scales | section 5.1
fitted 2 | an optimizer step takes 6.3 s beside passes and links; training reaches 30% of the FLOP/s, with the
    forward pass of old log-probs in it | the four training times of the synchronous rows and of DORA
fitted 1 | a decode step takes 13 ms beside its arithmetic and memory | the synchronous rows
assumed 5 | H800 with the simulator's other rates; TP 4; sigma 1.3 and correlation 0.7; prompts of 150
    tokens |
assumed 3 | half of the devices generate for one-step off-policy and DORA; 768 prompts in flight (RBS) for
    DORA and partial rollout |
"""
PAPER = Paper(
    name="dora",
    citation="Hu et al., 2026: DORA, a scalable asynchronous RL system for language model training",
    set_up=("Synchronous and partial rollout have all devices in turn; rewards take no time.",),
    parameters=parameters(PARAMETERS),
    tables={"Fig. 8": steps},
    contradictions=(
        "Throughput times step gives 2,370 tokens a sample for the synchronous rows and 2,610 for DORA's: the"
        " rows have different lengths.",
        "128 devices generate the same batch in 14.8 min, 64 in 14.9 min.",
    ),
    not_attempted="LongCat-Flash on 4,096 accelerators, rewards, overheads, the ablation of the KV cache.",
)
