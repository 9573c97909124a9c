"""The race of all schedules against what the papers promise, with intervals over seeds.

    python benchmarks/race.py [--seeds 3] [--schedules a,b,...] [--results F]

Runs `tailrace compare` once a seed, the schedules in another order each time, and keeps each one's numbers in
the folder: a race that was stopped goes on with the seed that is missing, and one that is there is only read.
Prints every schedule's figures, then ratios: of two schedules on the same seed, prompts and weights, the mean
over seeds with a 95 % t-interval. Model, mix and sizes stand in the config. The first `warm_up_rounds` of a
lap do not count. Length bias is measured against responses that nobody interrupted, to the prompts that the
lap drew.
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

from tailrace.config import load_config

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
COLUMNS = (
    ("time to target, s", "time_to_reward_s", "{:.1f}"),
    ("reward a sample", "reward", "{:.3f}"),
    ("samples/s", "samples_per_s", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("rollout tokens/s", "rollout_tokens_per_s", "{:.0f}"),
    ("lag, mean", "staleness_mean", "{:.2f}"),
    ("lag, max", "staleness_max", "{:.0f}"),
    ("ESS", "ess_mean", "{:.3f}"),
    ("carried tokens", "carried_tokens", "{:.1%}"),
    ("carried samples", "carried_samples", "{:.1%}"),
    ("waste", "waste_share", "{:.1%}"),
    ("length bias", "length_bias", "{:+.1%}"),
)
"""Title, figure of a lap, form. In brackets: the seeds that have it, where not all do."""
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


def race(config: Path, result: Path, seed: int, schedules: list[str], *, output: int | None = None) -> None:
    """One seed's laps. output: where their tables go, as subprocess has it."""
    turn = seed % len(schedules)
    order = ",".join(schedules[turn:] + schedules[:turn])
    words = ["compare", str(config), "--schedules", order, "--repeats", "1"]
    words += ["--run.seed", str(seed), "--json", str(result)]
    subprocess.run([sys.executable, "-m", "tailrace.cli", *words], check=True, stdout=output)


def table(laps: dict[str, Laps]) -> None:
    """Means over the seeds, a line a schedule."""
    print(f"{'':24}" + "".join(f"{title:>18}" for title, _, _ in COLUMNS))
    for name, of in laps.items():
        cells = []
        for _, figure, form in COLUMNS:
            values = [lap[figure] for lap in of if lap[figure] is not None]
            cells.append(
                form.format(fmean(values)) + (f" ({len(values)})" if len(values) < len(of) else "")
                if values
                else "-"
            )
        print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))


def report(laps: dict[str, Laps]) -> None:
    for bar in BARS:
        if bar.name in laps and bar.other in laps:
            values = ratios(laps[bar.name], laps[bar.other], bar.figure)
            verdict = "met" if fmean(values) >= bar.least else "MISSED"
            words = f"{bar.name} over {bar.other}, {bar.figure}"
            by_tokens = interval(ratios(laps[bar.name], laps[bar.other], "tokens_per_s"))
            print(f"{words:62} {interval(values):16} bar {bar.least:<6} {verdict:7} by tokens/s {by_tokens}")
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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--schedules", help="by default those of the config")
    parser.add_argument("--results", type=Path, default=Path("race"))
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    schedules = arguments.schedules.split(",") if arguments.schedules else list(config.compare.schedules)
    arguments.results.mkdir(parents=True, exist_ok=True)
    laps: dict[str, Laps] = {name: [] for name in schedules}
    for seed in range(arguments.seeds):
        result = arguments.results / f"seed-{seed}.json"
        if not result.exists():
            race(arguments.config, result, seed, schedules)
        figures = json.loads(result.read_text())["schedules"]
        for name in schedules:
            laps[name] += figures[name]["laps"]
    table(laps)
    report(laps)


if __name__ == "__main__":
    main()
