"""All schedules in set-ups drawn at random, in classes of equal staleness, on equal devices.

    python benchmarks/race_random.py [--setups 20] [--seed 0] [--steps 48] [--json FILE]

A set-up has a number of devices. Separate: some generate and the others train, divided so that both sides
have about the same rate. In turn: all generate, then all train, with the cost of the change. A schedule that
trains while it generates has the separate ones. One that does not has them in turn, where each stage is about
twice as fast. `tailrace_on_policy` has the placement on which it is faster; RollPacker's race of prompts is
`tailbatch` in turn and `rollpacker` on separate ones. All steps of a set-up train the same number of groups.

Classes: the lag of a trained token in optimizer steps is at most 0, 1 or 3, or has no bound. Within a class
every schedule keeps the same bound, and those with a choice have about as many groups in flight.

A racer with a larger length bias than 2% (src/tailrace/plan/measure.py) is printed and cannot win. Schedules
that race or sort prompts train short ones in some steps and long ones in others. The spread shows this: the
standard deviation of the mean lengths of a run's steps, as a share of their mean.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from random_setups import Racer, Setup, classes, drawn
from tailrace.controller.base import RunSettings
from tailrace.plan.plan import measure
from tailrace.rollout.placement import DISAGGREGATED, Shared

BIASED = 0.02
WARM_UP_STEPS = 8
"""Of 48. Neither they nor the 40 others cut a batch that is sorted by length (4 or 8 steps), or the rounds
between two long ones (5)."""
OURS = ("tailrace", "tailrace_on_policy")


@dataclass(frozen=True)
class Result:
    """What a racer did in a set-up."""

    s_per_1000_samples: float
    length_bias: float
    step_spread: float
    lag_mean: float
    lag_max: float
    wasted: float
    in_turn: bool

    @property
    def biased(self) -> bool:
        return abs(self.length_bias) > BIASED


def lap(setup: Setup, entry: Racer, num_steps: int, *, in_turn: bool) -> Result:
    """Run a schedule in virtual time."""
    settings = RunSettings(
        rounds=num_steps // entry.steps, group_size=setup.group_size, give_up_s=1e9, patience_s=1e9
    )
    run = measure(
        entry.schedule,
        setup.sim(in_turn),
        settings,
        shared=Shared("colocated") if in_turn else DISAGGREGATED,
        warm_up_rounds=WARM_UP_STEPS // entry.steps,
    )
    return Result(
        s_per_1000_samples=1000 / run["samples_per_s"],
        length_bias=run["length_bias"],
        step_spread=run["step_spread"],
        lag_mean=run["lag_mean"],
        lag_max=run["lag_max"],
        wasted=run["waste_share"],
        in_turn=in_turn,
    )


def race(setup: Setup, num_steps: int) -> dict[str, dict[str, Result]]:
    """Every racer on the placement on which it is faster, by class."""
    return {
        name: {
            entry.name: min(
                (lap(setup, entry, num_steps, in_turn=turn) for turn in entry.in_turn),
                key=lambda result: result.s_per_1000_samples,
            )
            for entry in racers
        }
        for name, racers in classes(setup).items()
    }


def fastest(results: dict[str, Result], names: Iterable[str]) -> tuple[str, Result]:
    """The fastest racer without length bias; if all have one, the fastest."""
    return min(
        ((name, results[name]) for name in names),
        key=lambda pair: (pair[1].biased, pair[1].s_per_1000_samples),
    )


def ours_and_theirs(results: dict[str, Result]) -> tuple[tuple[str, Result], tuple[str, Result]]:
    """The fastest of tailrace's own schedules, and the fastest published one."""
    ours = [name for name in results if is_ours(name)]
    return fastest(results, ours), fastest(results, [name for name in results if name not in ours])


def ratio(results: dict[str, Result]) -> float:
    """Time of ours over the time of the fastest published racer; above 1: ours loses."""
    (_, ours), (_, theirs) = ours_and_theirs(results)
    return ours.s_per_1000_samples / theirs.s_per_1000_samples


def is_ours(name: str) -> bool:
    return name.split(",")[0] in OURS


def print_class(name: str, races: list[dict[str, Result]], setups: list[Setup]) -> None:
    print(f"\n{name}: seconds per 1,000 samples over those of the fastest racer without length bias")
    print(
        f"{'':28}{'median':>8}{'worst':>8}{'first':>7}{'in turn':>9}{'lag':>7}"
        f"{'wasted':>8}{'bias':>8}{'biased':>8}{'spread':>8}"
    )
    best = [fastest(results, results) for results in races]
    for entry in races[0]:
        mine = [results[entry] for results in races]
        over = [r.s_per_1000_samples / b[1].s_per_1000_samples for r, b in zip(mine, best, strict=True)]
        first = sum(b[0] == entry for b in best)
        mark = " *" if is_ours(entry) else ""
        print(
            f"{entry + mark:28}{median(over):8.2f}{max(over):8.2f}{first:7}{sum(r.in_turn for r in mine):9}"
            f"{fmean(r.lag_mean for r in mine):7.2f}{fmean(r.wasted for r in mine):8.1%}"
            f"{median(r.length_bias for r in mine):+8.1%}{sum(r.biased for r in mine):8}"
            f"{median(r.step_spread for r in mine):8.2f}"
        )
    ratios = [ratio(results) for results in races]
    print(f"ours (*) is first in {sum(each <= 1.0 for each in ratios)} of {len(ratios)}; its time over the")
    print(f"fastest published one's: median {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    for times, setup, results in sorted(zip(ratios, setups, races, strict=True), key=lambda each: -each[0]):
        if times > 1.0:
            (ours, _), (theirs, result) = ours_and_theirs(results)
            turn = "in turn" if result.in_turn else "separate"
            print(f"  set-up {setup.number}: {ours} loses to {theirs} ({turn}) by {times - 1:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setups", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=48, help="optimizer steps of a run: 8, and a multiple of 40"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    setups: list[Setup] = []
    races: list[dict[str, dict[str, Result]]] = []
    for number in range(arguments.setups):
        setups.append(setup := drawn(number, arguments.seed))
        print(f"set-up {setup.number}: {setup.words}", flush=True)
        races.append(race(setup, arguments.steps))
        if arguments.json:
            write(arguments.json, setups, races)
    for name in races[0]:
        print_class(name, [each[name] for each in races], setups)


def write(path: Path, setups: list[Setup], races: list[dict[str, dict[str, Result]]]) -> None:
    """The set-ups raced so far, with every racer's figures."""
    found = [
        {"setup": asdict(setup)}
        | {name: {n: asdict(r) for n, r in results.items()} for name, results in each.items()}
        for setup, each in zip(setups, races, strict=True)
    ]
    ratios = {name: [ratio(each[name]) for each in races] for name in races[0]}
    path.write_text(json.dumps({"ours_over_fastest_published": ratios, "setups": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
