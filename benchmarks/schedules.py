"""All schedules in one simulated setting: how fast, how stale, what is wasted, what is biased.

    python benchmarks/schedules.py [--rounds 60] [--only NAME]
    python benchmarks/schedules.py --equal-devices

64 groups of 8 samples a step, 512 prompts that are repeated every epoch. The first two epochs (16 rounds) are
not counted, because length histories fill and the population in flight settles in them. The length bias is
the mean trained length over the mean length of all prompts, each counted equally.

--equal-devices asks how much of tailrace's lead over april is due to the devices. Its first table gives both
the same engines and the same trainer, on devices of their own. A stop-and-go schedule leaves the trainer's
devices idle while it generates, and the engines' while it trains. In the second table april is therefore
colocated: all devices generate, then all devices train, at no cost for the change. tailrace splits the same
devices.
"""

import argparse
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from tailrace import clock
from tailrace.controller.base import RunSettings
from tailrace.controller.execution import execute
from tailrace.controller.run import Run
from tailrace.controller.simulation import simulated_parts
from tailrace.record.events import Recorder
from tailrace.record.laps import Lap, LapMeter
from tailrace.record.steps import StepMeter
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import SimEngineSettings, SimLengthSettings, SimSettings, SimTrainerSettings
from tailrace.sim.world import Lengths
from tailrace.types import Group, Prompt, Sample, SampleId

GROUPS, GROUP_SIZE, ROWS, WARM_UP_ROUNDS = 64, 8, 512, 16
MAX_TOKENS = 16_384
LENGTHS = SimLengthSettings(median_tokens=1230.0, sigma=1.3, max_tokens=MAX_TOKENS, rows=ROWS)
ENGINES, TRAINER_TOKENS_PER_S = 4, 60_000.0
DEVICES = 2 * ENGINES
"""An engine has one device; as many devices train."""

Bound = Callable[[Run], Coroutine[Any, Any, None]]


def bound(name: str, **parameters: Any) -> Bound:
    return partial(SCHEDULES[name], **parameters)


def round_of(name: str, **parameters: Any) -> Bound:
    return bound(name, groups_per_round=GROUPS, **parameters)


def tailrace(in_flight: int, staleness: int) -> Bound:
    return bound("tailrace", groups_per_step=GROUPS, groups_in_flight=in_flight, staleness=staleness)


def pipelinerl(in_flight: int) -> Bound:
    """in_flight: groups."""
    return bound(
        "pipelinerl",
        groups_per_step=GROUPS,
        in_flight_per_engine=in_flight * GROUP_SIZE // ENGINES,
        ring_groups=2 * GROUPS,
        ring_full="block",
    )


RACERS: dict[str, Bound] = {
    "serial": round_of("serial", groups_per_step=GROUPS),
    "rolloutpipe, 4 steps a round": round_of("rolloutpipe", groups_per_step=GROUPS // 4),
    "rolloutpipe_eager, 1 step a round": round_of("rolloutpipe_eager", groups_per_step=GROUPS),
    "tailbatch, prompts 1.25": round_of("tailbatch", response_speculation=1.0),
    "tailbatch, both 1.25": round_of("tailbatch"),
    "tailbatch_async, prompts 1.25": round_of("tailbatch_async", response_speculation=1.0),
    "rollpacker, prompts 1.25": round_of("rollpacker", response_speculation=1.0),
    "rollpacker, both 1.25": round_of("rollpacker"),
    "tailrace_on_policy, race only": round_of("tailrace_on_policy", long_share=0.0),
    "tailrace_on_policy, share 0.1": round_of("tailrace_on_policy", long_share=0.1),
    "tailrace_on_policy, share 0.2": round_of("tailrace_on_policy", long_share=0.2),
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
PAIRS = (
    ("april, 1.5x", "tailrace, 1.5x, bound 2"),
    ("april, 2x", "tailrace, 2x, bound 4"),
)
"""APRIL, and tailrace with the same number of groups in flight."""
HEAD = ("samples/s", "of the 1st", "lag", "max", "wasted", "bias", "deferred")


@dataclass(frozen=True, slots=True)
class Devices:
    """What generates and what trains."""

    engines: int = ENGINES
    trainer_tokens_per_s: float = TRAINER_TOKENS_PER_S

    @property
    def sim(self) -> SimSettings:
        return SimSettings(
            engines=SimEngineSettings(count=self.engines),
            trainer=SimTrainerSettings(tokens_per_s=self.trainer_tokens_per_s),
            lengths=LENGTHS,
        )

    @property
    def words(self) -> str:
        engine = SimEngineSettings()
        step = f"{1e3 * engine.base_s:.0f} ms + {1e3 * engine.slope_s:.2f} ms a sequence and decode step"
        lengths = f"median {LENGTHS.median_tokens:.0f}, limit {MAX_TOKENS} tokens"
        return (
            f"simulated costs, no model; lengths: {lengths}; {self.engines} engines ({step}), "
            f"trainer {self.trainer_tokens_per_s:,.0f} tokens/s"
        )


SEPARATE = Devices()
COLOCATED = Devices(DEVICES, TRAINER_TOKENS_PER_S * DEVICES / (DEVICES - ENGINES))
SPLITS = [
    Devices(count, TRAINER_TOKENS_PER_S * (DEVICES - count) / (DEVICES - ENGINES)) for count in (4, 5, 6)
]


def lap(schedule: Bound, devices: Devices, rounds: int) -> Lap:
    """Run a schedule to its end in virtual time."""
    meter = LapMeter(warm_up_rounds=WARM_UP_ROUNDS)

    async def run() -> None:
        settings = RunSettings(rounds=rounds, group_size=GROUP_SIZE)
        recorder = Recorder(StepMeter(meter, wall_clock=clock.wall_time))
        await execute(schedule, simulated_parts(devices.sim, settings.seed), settings, recorder)

    clock.run(run(), virtual=True)
    return meter.lap()


def mean_length() -> float:
    """Mean over all rows, 16 responses each."""
    length_of = Lengths(LENGTHS, 0)
    groups = [Group(Prompt(row, [1], row_number=row), 16, []) for row in range(ROWS)]
    return fmean(
        length_of(Sample(SampleId(1_000_000 + group.prompt.index, 0, number), group))
        for group in groups
        for number in range(16)
    )


def line(name: str, lap: Lap, first: Lap, expected: float) -> str:
    return (
        f"{name:42}{lap.samples_per_s:11.2f}{lap.samples_per_s / first.samples_per_s:11.2f}"
        f"{lap.staleness_mean:11.2f}{lap.staleness_max:11.0f}{lap.waste_share:11.1%}"
        f"{lap.length_mean / expected - 1:+11.1%}{lap.deferrals_max:11.0f}"
    )


def table(racers: dict[str, tuple[Bound, Devices]], rounds: int) -> None:
    print(f"{'':42}" + "".join(f"{word:>11}" for word in HEAD))
    first, expected = None, mean_length()
    for name, (schedule, devices) in racers.items():
        measured = lap(schedule, devices, rounds)
        first = first or measured
        print(line(name, measured, first, expected), flush=True)


def equal_devices(rounds: int) -> None:
    print(f"separate devices, {ENGINES} generate and {DEVICES - ENGINES} train: {SEPARATE.words}")
    for april, ours in PAIRS:
        table({name: (RACERS[name], SEPARATE) for name in (april, ours)}, rounds)
    print(f"\nequal devices, april colocated on all {DEVICES}: {COLOCATED.words}")
    for april, ours in PAIRS:
        racers = {f"{april}, colocated on {DEVICES}": (RACERS[april], COLOCATED)}
        racers |= {
            f"{ours}, {split.engines} + {DEVICES - split.engines}": (RACERS[ours], split) for split in SPLITS
        }
        table(racers, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--equal-devices", action="store_true", help="tailrace against april, both ways")
    arguments = parser.parse_args()
    if arguments.equal_devices:
        equal_devices(arguments.rounds)
    else:
        print(SEPARATE.words)
        racers = {name: (each, SEPARATE) for name, each in RACERS.items() if arguments.only in name}
        table(racers, arguments.rounds)


if __name__ == "__main__":
    main()
