"""The planner against exhaustive search, on clusters and length models drawn at random.

    python benchmarks/planner.py [--clusters 20] [--seed 0] [--json F]

Both have the same candidates and the same limits of staleness and length bias. Exhaustive search measures
every candidate over all optimizer steps. The regret of a cluster is the time of a step of the planner's
choice over that of the fastest candidate, minus 1. The speed-up is the processor time of exhaustive search
over that of the planner, both summed over the clusters.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from tailrace.controller.base import RunSettings
from tailrace.errors import ConfigError
from tailrace.plan.plan import Problem
from tailrace.plan.search import is_biased, search
from tailrace.sim.settings import (
    SimClusterSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
)

T = TypeVar("T")
DEVICES = ("A100-40G", "H100", "H200", "MI300X")
MODELS = ("Qwen3-1.7B", "Qwen3-4B", "Qwen2.5-7B", "Qwen3-8B")


@dataclass(frozen=True)
class Result:
    """One cluster. Times of a step are virtual, the others are processor time."""

    cluster: str
    candidates: int
    choice: str
    step_s: float
    fastest: str
    fastest_step_s: float
    planner_s: float
    exhaustive_s: float

    @property
    def regret(self) -> float:
        return self.step_s / self.fastest_step_s - 1.0

    @property
    def speedup(self) -> float:
        return self.exhaustive_s / self.planner_s


def drawn(number: int, seed: int) -> tuple[str, Problem]:
    """The cluster of a number, in words and as a problem. One that no candidate fits is not counted."""
    chance = random.Random(f"cluster {seed} {number}")
    while True:
        words, problem = drawn_once(chance)
        try:
            problem.entries()
        except ConfigError:
            continue
        return words, problem


def drawn_once(chance: random.Random) -> tuple[str, Problem]:
    """Every quantity independently, rates and times on a logarithmic scale."""

    def between(low: float, high: float) -> float:
        return math.exp(chance.uniform(math.log(low), math.log(high)))

    device, model, devices = chance.choice(DEVICES), chance.choice(MODELS), chance.choice([2, 3, 4, 6])
    groups, group_size = chance.choice([(4, 2), (3, 3), (2, 4)])
    median_tokens = round(between(200, 2000))
    lag = chance.choice([0, 1, 3, math.inf])
    lengths = SimLengthSettings(
        median_tokens=median_tokens,
        sigma=chance.uniform(0.3, 1.5),
        correlation=chance.uniform(0.2, 0.95),
        max_tokens=min(median_tokens * chance.choice([8, 16, 32]), 32_000),
        rows=chance.choice([None, 6 * groups]),
    )
    sim = SimSettings(
        cluster=SimClusterSettings(
            device=device, model=model, devices=devices, training_efficiency=between(0.04, 0.5)
        ),
        engines=SimEngineSettings(slots=chance.choice([4, 8, 16, 32])),
        lengths=lengths,
        rewards=SimRewardSettings(workers=1024, median_s=between(0.05, 10.0), timeout_s=300.0),
    )
    words = (
        f"{devices} x {device}, {model}, {groups} x {group_size} a step, {median_tokens} tokens, sigma "
        f"{lengths.sigma:.2f}, lag up to {lag:g}"
    )
    return words, Problem(sim, RunSettings(rounds=1, group_size=group_size), groups, max_lag=lag)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def exhaustive(problem: Problem) -> dict[str, float]:
    """The seconds of a step of every candidate within the limits, by schedule and devices."""
    assert problem.sim.cluster
    found = {}
    for entry in problem.entries()[0]:
        measured = problem.measure(entry, problem.steps)
        if not is_biased(problem, measured):
            found[entry.candidate.name(problem.sim.cluster.devices)] = measured.step_s
    return found


def compared(number: int, seed: int) -> Result:
    words, problem = drawn(number, seed)
    plan, planner_s = timed(lambda: search(problem))
    times, exhaustive_s = timed(lambda: exhaustive(problem))
    assert problem.sim.cluster
    fastest = min(times, key=times.__getitem__)
    choice = plan.best.candidate.name(problem.sim.cluster.devices)
    return Result(
        cluster=words,
        candidates=plan.candidates,
        choice=choice,
        step_s=plan.best.step_s,
        fastest=fastest,
        fastest_step_s=times[fastest],
        planner_s=planner_s,
        exhaustive_s=exhaustive_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: list[Result] = []
    for number in range(arguments.clusters):
        results.append(each := compared(number, arguments.seed))
        print(
            f"{number}: {each.cluster}; {each.candidates} candidates: {each.choice}, "
            f"regret {each.regret:.1%}, {each.speedup:.1f} times faster",
            flush=True,
        )
        if each.regret > 0:
            print(f"   the fastest: {each.fastest}")
        speedup = sum(each.exhaustive_s for each in results) / sum(each.planner_s for each in results)
        regrets = [each.regret for each in results]
        if arguments.json:
            found = {
                "worst_regret": max(regrets),
                "speedup": speedup,
                "clusters": [asdict(each) for each in results],
            }
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"regret: worst {max(regrets):.1%}, {sum(regret > 0.03 for regret in regrets)} above 3%; "
        f"{speedup:.1f} times faster (median of clusters {median(each.speedup for each in results):.1f}); "
        f"exhaustive search took {sum(each.exhaustive_s for each in results):.0f} s"
    )


if __name__ == "__main__":
    main()
