"""The race of all schedules, live on two cores, with intervals over seeds.

    python benchmarks/race [--seeds 3] [--schedules a,b,...] [--results DIR]

A lap of each schedule a seed, the schedules in another order each time. The laps of a seed are kept in
DIR/seed-N.json: a race that was stopped continues with the seed that is missing. Printed are the figures of
every schedule, means over the seeds, and ratios between schedules with the same seed, prompts and initial
weights, with a 95 % t-interval. The model, the data and the sizes are in race.toml and racers.py.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from probe import LapLog, length_bias, probe, time_to
from racers import CONFIG, ENTRIES, Entry
from safetensors import safe_open

from tailrace import clock
from tailrace.commands.compare import Arena, Racer, in_turn
from tailrace.commands.live import advantages_of, training_prompts
from tailrace.config import load_config
from tailrace.controller.execution import execute
from tailrace.record.events import Recorder
from tailrace.record.figures import LAPS, Row
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary

TARGET_ACCURACY = 0.8
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t of a two-sided interval, by the number of seeds."""

Laps = list[dict[str, float]]

RATIOS = (
    ("rolloutpipe", "main_s_per_1000_samples", "serial"),
    ("rolloutpipe_eager", "main_s_per_1000_samples", "serial"),
    ("april", "rollout_tokens_per_s", "serial"),
    ("april", "samples_per_s", "serial"),
    ("tailbatch", "samples_per_s", "serial"),
    ("rollpacker", "samples_per_s", "serial"),
    ("pipelinerl", "samples_per_s", "conventional"),
    ("tailrace", "samples_per_s", "april"),
    ("tailrace_on_policy", "samples_per_s", "serial"),
)
"""A schedule, a figure, and the schedule whose figure it is divided by."""
COLUMNS = (
    ("time to target, s", "time_to_reward_s", "{:.1f}"),
    ("reward a sample", "reward", "{:.3f}"),
    ("samples/s", "samples_per_s", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("rollout tokens/s", "rollout_tokens_per_s", "{:.0f}"),
    ("staleness, max", "staleness_max", "{:.0f}"),
    ("lag, mean", "lag_mean", "{:.2f}"),
    ("lag, max", "lag_max", "{:.0f}"),
    ("ESS", "ess_mean", "{:.3f}"),
    ("carried tokens", "carried_tokens", "{:.1%}"),
    ("carried samples", "carried_samples", "{:.1%}"),
    ("waste", "waste_share", "{:.1%}"),
    ("length bias", "length_bias", "{:+.1%}"),
)
"""Title, figure of a lap, form. The table shows in brackets how many seeds have a figure, if not all do."""


async def race(
    entries: Mapping[str, Entry], racers: Mapping[str, Racer], seed: int, folder: Path
) -> dict[str, Row]:
    """One lap of each schedule.

    Args:
        folder: for the initial weights, the checkpoints and the logs of the workers.
    """
    laps: dict[str, Row] = {}
    async with aclosing(Arena(folder)) as arena:
        for name in in_turn(racers, seed):
            laps[name] = await run_lap(racers[name], entries[name], arena, folder / name)
            print(f"seed {seed}: {name}: {laps[name]['samples_per_s']:.1f} samples/s", flush=True)
    return {name: laps[name] for name in entries}


async def run_lap(racer: Racer, entry: Entry, arena: Arena, folder: Path) -> Row:
    """A lap from the initial weights, with its checkpoints probed afterwards."""
    config = racer.config
    assert config.sampling
    parts = replace(await arena.parts(racer), prompts=training_prompts(config, config.run.seed))
    summary = Summary()
    log = LapLog()
    recorder, advantages = (
        Recorder(StepMeter(summary, log, wall_clock=clock.wall_time)),
        advantages_of(config),
    )
    await execute(racer.schedule, parts, config.run, recorder, compute_advantages=advantages, folder=folder)
    probes = await probe(parts, log.checkpoints, config.run)
    found = {
        "length_bias": length_bias(log.trained, probes, entry.warm_up_rounds),
        "time_to_reward_s": time_to(TARGET_ACCURACY, probes, log.ends_s),
    }
    return summary.lap(entry.warm_up_rounds) | {
        key: value for key, value in found.items() if value is not None
    }


def interval(values: Sequence[float]) -> str:
    """Mean and half width of the 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    return f"{fmean(values):.2f} +- {T_95[len(values)] * stdev(values) / math.sqrt(len(values)):.2f}"


def ratios(one: Laps, other: Laps, figure: str) -> list[float]:
    """One ratio a seed."""
    return [a[figure] / b[figure] for a, b in zip(one, other, strict=True)]


def print_table(laps: Mapping[str, Laps]) -> None:
    """Means over the seeds, a line for each schedule."""
    print(f"{'':24}" + "".join(f"{title:>18}" for title, _, _ in COLUMNS))
    for name, seeds in laps.items():
        cells = []
        for _, figure, form in COLUMNS:
            values = [lap[figure] for lap in seeds if lap[figure] is not None]
            some = f" ({len(values)})" if len(values) < len(seeds) else ""
            cells.append(form.format(fmean(values)) + some if values else "-")
        print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))


def print_ratios(laps: Mapping[str, Laps]) -> None:
    for name, figure, other in RATIOS:
        if name in laps and other in laps:
            ratio = interval(ratios(laps[name], laps[other], figure))
            print(f"{f'{name} over {other}, {figure}':64} {ratio}")


def num_parameters(model: Path) -> int:
    """Parameters of the model in a Hugging Face folder."""
    with safe_open(model / "model.safetensors", framework="numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def set_up() -> str:
    """The model, the machine and the processes of the race, in one line."""
    config = load_config(CONFIG)
    assert config.model and config.sampling
    size = num_parameters(config.model.path) / 1e6
    engine, trainer = config.engine, config.trainer
    return (
        f"model of {size:.2f}M parameters (float32), at most {config.sampling.max_completion_tokens} tokens "
        f"a response; {os.cpu_count()} cores, {engine.replicas} engine and 1 trainer on {engine.device}, "
        f"{engine.threads} and {trainer.threads} threads"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--schedules", help="some of the racers; by default all")
    parser.add_argument("--results", type=Path, default=Path("race"))
    arguments = parser.parse_args()
    names = arguments.schedules.split(",") if arguments.schedules else list(ENTRIES)
    entries = {name: ENTRIES[name] for name in names}
    arguments.results.mkdir(parents=True, exist_ok=True)
    laps: dict[str, Laps] = {name: [] for name in entries}
    for seed in range(arguments.seeds):
        result = arguments.results / f"seed-{seed}.json"
        if not result.exists():
            racers = {name: entry.racer(seed) for name, entry in entries.items()}
            with tempfile.TemporaryDirectory() as scratch:
                measured = clock.run(race(entries, racers, seed, Path(scratch)), virtual=False)
            figures = {name: {key: lap.get(key) for key in LAPS} for name, lap in measured.items()}
            result.write_text(json.dumps({"set_up": set_up(), "laps": figures}, indent=2) + "\n")
        for name, lap in json.loads(result.read_text())["laps"].items():
            if name in laps:
                laps[name].append(lap)
    print(set_up())
    print_table(laps)
    print_ratios(laps)


if __name__ == "__main__":
    main()
