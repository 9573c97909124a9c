"""All schedules in one simulated setting: how fast, how stale, what is wasted, what is biased.

    python benchmarks/schedules.py [--rounds 60] [--only NAME]
    python benchmarks/schedules.py --equal-devices [--sigma 1.3] [--reward-s 0.3]

64 groups of 8 samples a step, 512 prompts that are repeated every epoch. The first two epochs (16 rounds) are
not counted, because length histories fill and the population in flight settles in them. The length bias is
the mean trained length over the mean length of all prompts, each counted equally.

--equal-devices gives every schedule the same eight H100 and Qwen2.5-7B ([sim.cluster]). Schedules that stop
and go have all devices in turn, at the cost of a switch. Those that generate while they train divide them,
and have the best of three divisions. The on-policy ones also try the elastic placement. It asks three things:
how much faster is tailrace than april, is tailrace_on_policy faster than RollPacker's race of prompts, and
what leads when a reward takes 30 s?
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import nan
from statistics import fmean
from typing import Any

from tailrace.controller.base import RunSettings
from tailrace.controller.simulation import Schedule, simulate
from tailrace.record.figures import Row
from tailrace.rollout.placement import Kind, Shared
from tailrace.schedules import SCHEDULES
from tailrace.sim.cluster import rates
from tailrace.sim.settings import (
    SimClusterSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)
from tailrace.sim.world import Lengths
from tailrace.types import Group, Prompt, Sample, SampleId

GROUPS, GROUP_SIZE, ROWS, WARM_UP_ROUNDS = 64, 8, 512, 16
MAX_TOKENS = 16_384
LENGTHS = SimLengthSettings(median_tokens=1230.0, sigma=1.3, max_tokens=MAX_TOKENS, rows=ROWS)
ENGINES, TRAINER_TOKENS_PER_S = 4, 60_000.0
SPLITS = (4, 5, 6)
"""Of eight devices, those that generate."""


def bound(name: str, **parameters: Any) -> Schedule:
    return partial(SCHEDULES[name], **parameters)


def round_of(name: str, **parameters: Any) -> Schedule:
    return bound(name, groups_per_round=GROUPS, **parameters)


def tailrace(in_flight: int, staleness: int) -> Schedule:
    return bound("tailrace", groups_per_step=GROUPS, groups_in_flight=in_flight, staleness=staleness)


def pipelinerl(in_flight: int, engines: int = ENGINES) -> Schedule:
    """in_flight: groups."""
    return bound(
        "pipelinerl",
        groups_per_step=GROUPS,
        in_flight_per_engine=in_flight * GROUP_SIZE // engines,
        ring_groups=2 * GROUPS,
        ring_full="block",
    )


RACERS: dict[str, Schedule] = {
    "serial": round_of("serial", groups_per_step=GROUPS),
    "rolloutpipe, 4 steps a round": round_of("rolloutpipe", groups_per_step=GROUPS // 4),
    "rolloutpipe_eager, 1 step a round": round_of("rolloutpipe_eager", groups_per_step=GROUPS),
    "tailbatch, prompts 1.25": round_of("tailbatch", response_speculation=1.0),
    "tailbatch, both 1.25": round_of("tailbatch"),
    "tailbatch_async, prompts 1.25": round_of("tailbatch_async", response_speculation=1.0),
    "rollpacker, prompts 1.25": round_of("rollpacker", response_speculation=1.0),
    "rollpacker, both 1.25": round_of("rollpacker"),
    "tailrace_on_policy, sorted only": round_of("tailrace_on_policy", prompt_speculation=1.0),
    "tailrace_on_policy, race 2": round_of("tailrace_on_policy"),
    "conventional, 8 steps a round": bound("conventional", groups_per_step=GROUPS, steps_per_round=8),
    "pipelinerl, 1.25x in flight": pipelinerl(80),
    "pipelinerl, 2x in flight": pipelinerl(128),
    "april, 1.5x": round_of("april", groups_launched=96),
    "april, 2x": round_of("april", groups_launched=128),
    "tailrace, 1.25x, bound 2": tailrace(80, 2),
    "tailrace, 1.5x, bound 2": tailrace(96, 2),
    "tailrace, 1.5x, bound 4": tailrace(96, 4),
    "tailrace, 2x, bound 4": tailrace(128, 4),
    "tailrace, 3x, bound 8": tailrace(192, 8),
}
APRIL = ("april, 1.5x", "april, 2x")
TAILRACE = ("tailrace, 1.5x, bound 2", "tailrace, 2x, bound 4")
"""With the same groups in flight as APRIL."""
ON_POLICY = ("rollpacker, prompts 1.25", "tailrace_on_policy, race 2")
HEAD = ("samples/s", "of the 1st", "lag", "max", "wasted", "bias", "deferred")


SEPARATE = SimSettings(
    engines=SimEngineSettings(count=ENGINES),
    trainer=SimTrainerSettings(tokens_per_s=TRAINER_TOKENS_PER_S),
    lengths=LENGTHS,
)
APART: Kind = "disaggregated"
CLUSTER = SimClusterSettings(device="H100", model="Qwen2.5-7B", devices=8)


@dataclass(frozen=True, slots=True)
class Racer:
    """A schedule on its devices."""

    schedule: Schedule
    sim: SimSettings
    kind: Kind = APART

    def lap(self, rounds: int) -> Row:
        """Run the schedule to its end in virtual time."""
        simulated = simulate(
            self.schedule,
            self.sim,
            RunSettings(rounds=rounds, group_size=GROUP_SIZE),
            shared=Shared(self.kind),
            replicas=2 if self.kind == "elastic" else 1,
            warm_up_rounds=WARM_UP_ROUNDS,
        )
        return simulated.lap


def words(sim: SimSettings) -> str:
    """The rates of a set-up."""
    engine, trainer, lengths = sim.engines, sim.trainer, sim.lengths
    work = f"max({1e3 * engine.base_s:.2f} ms, {1e6 * engine.compute_s:.1f} us a request)"
    reads = f"{1e6 * engine.slope_s:.1f} us a request + {1e9 * engine.context_s:.1f} ns a position"
    step = f"{1e3 * engine.overhead_s:g} ms + {work} + {reads}"
    return (
        f"{engine.count} engines ({step}), trainer {trainer.tokens_per_s:,.0f} tokens/s and"
        f" {trainer.step_s:.2f} s a step; lengths: median {lengths.median_tokens:.0f}, sigma {lengths.sigma},"
        f" limit {MAX_TOKENS}; rewards of {sim.rewards.median_s:g} s"
    )


def mean_length(lengths: SimLengthSettings) -> float:
    """Mean over all rows, 16 responses each."""
    length_of = Lengths(lengths, 0)
    groups = [Group(Prompt(row, [1], row_number=row), 16, []) for row in range(ROWS)]
    return fmean(
        length_of(Sample(SampleId(1_000_000 + group.prompt.index, 0, number), group))
        for group in groups
        for number in range(16)
    )


def line(name: str, lap: Row, first: Row, expected: float) -> str:
    return (
        f"{name:46}{lap['samples_per_s']:11.2f}{lap['samples_per_s'] / first['samples_per_s']:11.2f}"
        f"{lap['lag_mean']:11.2f}{lap['lag_max']:11.0f}{lap['waste_share']:11.1%}"
        f"{lap['length_mean'] / expected - 1:+11.1%}{lap['deferrals_max']:11.0f}"
    )


def table(racers: Mapping[str, Racer], rounds: int) -> dict[str, Row]:
    """Run and print all; return their laps."""
    print(f"{'':46}" + "".join(f"{word:>11}" for word in HEAD))
    laps: dict[str, Row] = {}
    expected = mean_length(next(iter(racers.values())).sim.lengths)
    for name, racer in racers.items():
        laps[name] = racer.lap(rounds)
        print(line(name, laps[name], next(iter(laps.values())), expected), flush=True)
    return laps


def on_cluster(sigma: float, reward_s: float, rollout_devices: int | None) -> SimSettings:
    cluster = CLUSTER.model_copy(update={"rollout_devices": rollout_devices})
    rewards = SimRewardSettings(median_s=reward_s, workers=10_000, timeout_s=20 * max(reward_s, 1.0))
    lengths = LENGTHS.model_copy(update={"sigma": sigma})
    return rates(SimSettings(cluster=cluster, lengths=lengths, rewards=rewards))


def equal_racers(sigma: float, reward_s: float) -> dict[str, Racer]:
    in_turn = on_cluster(sigma, reward_s, None)
    racers = {f"{name}, in turn": Racer(RACERS[name], in_turn, "colocated") for name in (*APRIL, *ON_POLICY)}
    racers |= {f"{name}, elastic": Racer(RACERS[name], in_turn, "elastic") for name in ON_POLICY}
    for number in SPLITS:
        split = on_cluster(sigma, reward_s, number)
        apart = {name: RACERS[name] for name in (*TAILRACE, *ON_POLICY)}
        apart |= {f"pipelinerl, {share / GROUPS:g}x": pipelinerl(share, number) for share in (96, 128)}
        devices = f"{number} + {CLUSTER.devices - number}"
        racers |= {f"{name}, {devices}": Racer(schedule, split) for name, schedule in apart.items()}
    return racers


def equal_devices(rounds: int, sigma: float, reward_s: float, only: str) -> None:
    in_turn, split = on_cluster(sigma, reward_s, None), on_cluster(sigma, reward_s, 4)
    print(f"8 H100, Qwen2.5-7B\nin turn: {words(in_turn)}\n4 + 4: {words(split)}")
    racers = {name: each for name, each in equal_racers(sigma, reward_s).items() if only in name}
    laps = table(racers, rounds)

    def best(start: str) -> float:
        return max(
            (lap["samples_per_s"] for name, lap in laps.items() if name.startswith(start)), default=nan
        )

    for april, ours in zip(APRIL, TAILRACE, strict=True):
        print(f"{ours} over {april}: {best(ours) / best(april):.2f}x")
    race, *_ = ON_POLICY
    print(f"{race} over tailrace_on_policy: {best(race) / best('tailrace_on_policy'):.2f}x")
    print(f"pipelinerl over the best of tailrace: {best('pipelinerl') / max(map(best, TAILRACE)):.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--equal-devices", action="store_true", help="on eight H100, divided or in turn")
    parser.add_argument("--sigma", type=float, default=1.3, help="of the log-lengths, with --equal-devices")
    parser.add_argument("--reward-s", type=float, default=0.3, help="of a sample, with --equal-devices")
    arguments = parser.parse_args()
    if arguments.equal_devices:
        equal_devices(arguments.rounds, arguments.sigma, arguments.reward_s, arguments.only)
    else:
        print(f"simulated costs, no model: {words(SEPARATE)}")
        racers = {name: Racer(each, SEPARATE) for name, each in RACERS.items() if arguments.only in name}
        table(racers, arguments.rounds)


if __name__ == "__main__":
    main()
