"""RollPacker's parallelism planner under memory pressure, with tail batching (Figs. 6, 12b and 12c)."""

from collections.abc import Sequence
from functools import cache, partial
from statistics import fmean
from typing import NamedTuple

from reproductions.base import Figure, Table
from reproductions.rollpacker_runs import P0, PERIOD, R0, Model, tailbatch_of
from tailrace.contracts.engine import Engine
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.drivers.assembly.simulation import simulate
from tailrace.drivers.assembly.tensor_parallel import computed_profile
from tailrace.record.events import Event, Stepped
from tailrace.rollout.placement import DeviceSharing
from tailrace.rollout.profile import EngineProfile
from tailrace.sim.cluster import rates
from tailrace.sim.settings import SimEngineSettings, SimLengthSettings, SimSettings, SimTrainerSettings

LIMIT, MEDIAN_OF_LIMIT, SIGMA, PROMPT_TOKENS, SLOTS = 32_768, 0.32, 0.4, 200, 256
SIZES = (1, 2, 4, 8)
"""Tensor-parallel sizes on one node."""
PERIODS = 4
NOTE = (
    f"Lengths are assumed lognormal with sigma {SIGMA}; their median is fitted to the 87% of Fig. 6b:"
    f" {MEDIAN_OF_LIMIT} of the limit. Only rollouts take time."
)


class Rollout(NamedTuple):
    """Of one round."""

    seconds: float
    preemptions: float
    size: int


class Sizes:
    """Sink: the tensor-parallel size at each step."""

    def __init__(self) -> None:
        self.engines: Sequence[Engine] = ()
        self.found: list[int] = []

    def on(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.found.append(max(engine.width for engine in self.engines))

    def close(self) -> None:
        """Nothing is left open."""


def set_up(name: str, devices: int, size: int) -> SimSettings:
    """Engines of a size, and nothing else that takes time."""
    changes = {
        "engines": SimEngineSettings(slots=SLOTS * size),
        "trainer": SimTrainerSettings(tokens_per_s=1e9, step_s=0.0),
        "lengths": SimLengthSettings(
            median_tokens=MEDIAN_OF_LIMIT * LIMIT, sigma=SIGMA, max_tokens=LIMIT, prompt_tokens=PROMPT_TOKENS
        ),
    }
    return Model(name, devices, size, LIMIT).sim().changed(**changes)


@cache
def rollouts(
    name: str, devices: int, size: int, seed: int, rounds: int = PERIOD, *, planned: bool = False
) -> tuple[list[Rollout], list[Rollout]]:
    """The short and the long rounds of tail batching.

    Args:
        size: of all rounds, or the one with which the planner starts.
        planned: the planner chooses from SIZES.
    """
    smallest, largest = (SIZES[0], SIZES[-1]) if planned else (size, size)
    sharing = DeviceSharing(
        "colocated", max_width=largest // smallest, start_width=lambda _: size // smallest
    )
    sim, sizes = set_up(name, devices, smallest), Sizes()

    def parts() -> RunComponents:
        parts = simulated_parts(rates(sim), seed, sharing=sharing)
        sizes.engines = parts.engines
        return parts

    settings = RunSettings(rounds=rounds, group_size=R0, seed=seed)
    found = simulate(tailbatch_of(P0), sim, settings, parts=parts, sinks=[sizes])
    kinds: tuple[list[Rollout], list[Rollout]] = ([], [])
    for number, (step, row) in enumerate(zip(found.steps[:rounds], found.rounds, strict=False)):
        preempted = sum(value for key, value in step.items() if key.startswith("engines/preempted/"))
        one = Rollout(row["round/rollout_time_s"], preempted, sizes.found[number] * smallest)
        kinds[number % PERIOD == PERIOD - 1].append(one)
    return kinds


def figure_6(seed: int = 0) -> Table:
    """Fixed sizes in one period."""
    (short, long), (short_2, long_2) = (rollouts("Qwen3-8B", 8, size, seed) for size in (1, 2))
    over, fewer, less = "short over long rounds", "preemptions, reduction", "rollout, reduction"
    figures = (
        Figure("TP 1", f"preemptions, {over}", "x", 1.79, _ratio(short, long, "preemptions"), "predicted"),
        Figure("TP 1", f"rollout, {over}", "%", 87, 100 * _ratio(short, long), "fitted"),
        Figure("TP 2, short", fewer, "%", 21.1, _less(short_2, short, "preemptions"), "predicted"),
        Figure("TP 2, short", less, "%", 25, _less(short_2, short), "predicted"),
        Figure("TP 2, long", fewer, "%", 10.3, _less(long_2, long, "preemptions"), "predicted"),
        Figure("TP 2, long", less, "%", None, _less(long_2, long), "predicted"),
    )
    note = "In the paper a larger size erodes the long rounds; here a decode step of few requests gains, too."
    return Table("Fig. 6", "preemptions and rollouts, Qwen3-8B/32k on 8 GPUs", figures, (NOTE, note))


def figure_12bc(seed: int = 0) -> Table:
    """The planner, from the size that the paper starts with and from that of the offline profile."""
    name, devices = "Qwen2.5-14B", 16
    several = partial(rollouts, name, devices, seed=seed, rounds=PERIODS * PERIOD)
    profile = EngineProfile(computed_profile(rates(set_up(name, devices, 1)), SIZES), "computed")
    best = profile.fastest(SIZES, P0 * R0, devices)
    fixed, (short, long) = {size: several(size) for size in SIZES}, several(2, planned=True)
    last, without = short[1 - PERIOD :], fixed[2][0][1 - PERIOD :]
    faster = [before.seconds / after.seconds for before, after in zip(without, last, strict=True)]
    row, figures = "start at TP 2, last short rounds", []
    fewer = _less(last, without, "preemptions")
    figures += [Figure(row, "preemptions, reduction", "%", 13.8, fewer, "predicted")]
    figures += [Figure(row, "rollout, speed-up", "x", (1.11, 1.28), fmean(faster), "predicted")]
    for start in dict.fromkeys((2, best)):
        short, long = several(start, planned=True)
        row = f"start at TP {start}" + ", the profile's" * (start == best)
        figures += [Figure(row, "last size, short rounds", "TP", None, short[-1].size, "predicted")]
        figures += [Figure(row, "last size, long rounds", "TP", None, long[-1].size, "predicted")]
        for size, rounds in fixed.items():
            gain = _ratio([*rounds[0], *rounds[1]], [*short, *long])
            figures.append(Figure(row, f"rollouts, speed-up over TP {size}", "x", None, gain, "predicted"))
    note = "The rule sees preemptions, not times: it may stop before the fastest size, or pass it."
    return Table("Fig. 12b", f"planner, {name}/32k on {devices} GPUs", tuple(figures), (NOTE, note))


def _ratio(rounds: Sequence[Rollout], others: Sequence[Rollout], what: str = "seconds") -> float:
    return fmean(getattr(one, what) for one in rounds) / fmean(getattr(one, what) for one in others)


def _less(rounds: Sequence[Rollout], others: Sequence[Rollout], what: str = "seconds") -> float:
    """By how many percent the mean is less than that of others."""
    return 100 * (1 - _ratio(rounds, others, what))
