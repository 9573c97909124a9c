"""The race of all schedules against what the papers promise, with intervals over seeds.

    python benchmarks/race.py [--repeats 3] [--schedules a,b,...] [--config examples/race.toml] [--json FILE]

Runs `tailrace compare` (or reads its FILE, if that exists) and prints its ratios: of two schedules on the
same seed, prompts and weights, then the mean over seeds with a 95 % t-interval. Model, mix and sizes stand in
the config. The first `warm_up_rounds` of a lap do not count. Length bias is measured against responses that
nobody interrupted, to the prompts that the lap drew.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a two-sided interval, by the number of seeds."""

Laps = list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """One schedule's figure over another's must reach `least`."""

    name: str
    figure: str
    other: str
    least: float


BARS = (
    Bar("april", "rollout_tokens_per_s", "serial", 1.225),
    Bar("tailbatch", "samples_per_s", "serial", 1.2),
    Bar("rollpacker", "samples_per_s", "serial", 1.4),
    Bar("pipelinerl", "samples_per_s", "conventional", 1.8),
    Bar("pipelinerl", "samples_per_s", "conventional_both_cores", 1.3),
    Bar("tailrace", "samples_per_s", "april", 1.4),
    Bar("tailrace_on_policy", "samples_per_s", "serial", 1.4),
)
UNBIASED = ("serial", "tailbatch", "rollpacker", "tailrace_on_policy")
"""Their trained lengths must be within 2 % of uninterrupted ones."""


def interval(values: list[float]) -> str:
    """Mean and half width."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    return f"{fmean(values):.2f} +- {T_95[len(values)] * stdev(values) / math.sqrt(len(values)):.2f}"


def ratios(one: Laps, other: Laps, figure: str) -> list[float]:
    """Lap by lap: the same seed."""
    return [a[figure] / b[figure] for a, b in zip(one, other, strict=True)]


def race(config: Path, result: Path, repeats: int | None, schedules: str | None) -> None:
    words = ["compare", str(config), "--json", str(result)]
    words += ["--repeats", str(repeats)] if repeats else []
    words += ["--schedules", schedules] if schedules else []
    subprocess.run([sys.executable, "-m", "tailrace.cli", *words], check=True)


def report(laps: dict[str, Laps]) -> None:
    for bar in BARS:
        if bar.name in laps and bar.other in laps:
            values = ratios(laps[bar.name], laps[bar.other], bar.figure)
            verdict = "met" if fmean(values) >= bar.least else "MISSED"
            words = f"{bar.name} over {bar.other}, {bar.figure}"
            print(f"{words:62} {interval(values):16} bar {bar.least:<6} {verdict}")
    show(laps, "length bias, must be within 2 %", "length_bias", UNBIASED, lambda bias: abs(bias) <= 0.02)
    if "tailrace" in laps and "april" in laps:
        ours, april = (fmean(lap["staleness_mean"] for lap in laps[name]) for name in ("tailrace", "april"))
        verdict = "met" if ours <= april else "MISSED"
        print(f"mean staleness of tailrace {ours:.2f}, must be at most april's {april:.2f}: {verdict}")
    for name in laps:
        print(f"{name}: reward a sample {interval([lap['reward'] for lap in laps[name]])}")


def show(
    laps: dict[str, Laps], title: str, figure: str, names: tuple[str, ...], good: Callable[[float], bool]
) -> None:
    for name in names:
        values = [lap[figure] for lap in laps.get(name, []) if lap[figure] is not None]
        if values:
            verdict = "met" if good(fmean(values)) else "MISSED"
            print(f"{name}: {title}: {fmean(values):+.3f} ({interval(values)}) {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("examples/race.toml"))
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--schedules")
    parser.add_argument("--json", type=Path, default=Path("race.json"))
    arguments = parser.parse_args()
    if not arguments.json.exists():
        race(arguments.config, arguments.json, arguments.repeats, arguments.schedules)
    numbers = json.loads(arguments.json.read_text())
    report({name: figures["laps"] for name, figures in numbers["schedules"].items()})


if __name__ == "__main__":
    main()
