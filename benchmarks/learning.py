"""What schedules learn from equally many samples, from several seeds.

    python benchmarks/learning.py [lag|april|order] [--seeds 3] [--folder DIR] [--json F] [--figure F.png]

lag    in-flight updates against conventional RL with G = 8, 16, 32 and 64 steps a round (PipelineRL,
       Figs. 5a, 5b, 6b and 10), with its loss: REINFORCE, token weights truncated at 5
april  april against serial (APRIL, Tables 2 and 5 to 7)
order  rolloutpipe, which trains short groups first, against serial

Each run trains the quickstart's model on as many samples as the others of its study. Printed, mean over the
seeds and the half-width of its 95% interval (Student's t): the reward of the samples of each quarter of the
run, held-out accuracy at the end, effective sample size, largest lag in optimizer steps, waste and seconds.
Seconds hold for one engine and one trainer of one thread each. --folder keeps the runs, and a run that has
ended there is not repeated.
"""

import json as jsons
import tempfile
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from common import QUICKSTART, run, write
from tailrace.api import load_config, train

SAMPLES, GROUP_SIZE = 8192, 8
QUARTERS = 4


class Study(NamedTuple):
    """What is compared: settings of all runs, and the schedule of each with its number of rounds."""

    settings: dict[str, str]
    schedules: dict[str, dict[str, object]]
    rounds: dict[str, int]


def conventional(steps: int) -> dict[str, object]:
    """Conventional RL with G = steps."""
    return {"name": "conventional", "groups_per_step": STEP, "steps_per_round": steps}


STEP, ROUND, GROUPS = 4, 32, SAMPLES // GROUP_SIZE
LAGS = (8, 16, 32, 64)
WHOLE: dict[str, object] = {"groups_per_round": ROUND, "groups_per_step": 16}
RING: dict[str, object] = {"in_flight_per_engine": 64, "ring_groups": 8}
STUDIES = {
    "lag": Study(
        {"algorithm.name": "reinforce", "trainer.learning_rate": "2e-4"},
        {"pipelinerl": {"name": "pipelinerl", "groups_per_step": STEP, **RING}}
        | {f"G={steps}": conventional(steps) for steps in LAGS},
        {"pipelinerl": GROUPS // STEP} | {f"G={steps}": GROUPS // STEP // steps for steps in LAGS},
    ),
    "april": Study(
        {},
        {
            "serial": {"name": "serial", **WHOLE},
            "april": {"name": "april", "groups_per_round": ROUND, "groups_launched": 2 * ROUND},
        },
        {"serial": GROUPS // ROUND, "april": GROUPS // ROUND},
    ),
    "order": Study(
        {"trainer.learning_rate": "2e-4"},
        {name: {"name": name, **WHOLE, "groups_per_step": STEP} for name in ("serial", "rolloutpipe")},
        {"serial": GROUPS // ROUND, "rolloutpipe": GROUPS // ROUND},
    ),
}


def learn(study: Study, name: str, seed: int, folder: Path) -> None:
    """Train the quickstart's model; the files of the run are in the folder."""
    if (folder / "summary.json").exists():
        return
    rounds = str(study.rounds[name])
    always = {
        "run.seed": str(seed),
        "run.rounds": rounds,
        "run.eval_every": rounds,
        "run.checkpoint_every": "0",
    }
    config = load_config(QUICKSTART, {**always, **study.settings})
    train(config.model_copy(update={"schedule": study.schedules[name]}), folder)


def figures(folder: Path) -> dict[str, float]:
    """What is compared of one run."""
    rows = [jsons.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    samples = [row["samples/trained"] for row in steps]
    quarters: list[list[tuple[float, float]]] = [[] for _ in range(QUARTERS)]
    trained = 0.0
    for row, number in zip(steps, samples, strict=True):
        quarters[min(QUARTERS - 1, int(QUARTERS * trained / sum(samples)))].append((row["reward"], number))
        trained += number
    found = {
        f"reward/{place}": sum(reward * number for reward, number in quarter)
        / sum(number for _, number in quarter)
        for place, quarter in enumerate(quarters, 1)
    }
    wasted = sum(value for row in rows for key, value in row.items() if key.startswith("tail/wasted_tokens/"))
    return {
        **found,
        "accuracy": [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1],
        "ess": fmean(row["ess"] for row in steps),
        "lag": max(row["lag/max"] for row in steps),
        "waste": wasted / sum(row.get("tokens/generated", 0.0) for row in rows),
        "samples": sum(samples),
        "seconds": steps[-1]["time"],
    }


def interval(values: list[float]) -> float:
    """Half the width of the 95% interval of the mean; 0 with one value."""
    from scipy.stats import t

    return (
        float(t.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    )


def draw(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    """The reward over samples of each run, with its interval."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    places = [(number + 0.5) / QUARTERS * SAMPLES for number in range(QUARTERS)]
    for name, found in results.items():
        rewards = [found[f"reward/{number}"] for number in range(1, QUARTERS + 1)]
        axes.errorbar(places, list(map(fmean, rewards)), list(map(interval, rewards)), label=name, capsize=3)
    axes.set(xlabel="trained samples", ylabel="reward")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(
    study: Literal["lag", "april", "order"] = "lag",
    seeds: int = 3,
    only: str = "",
    folder: Path | None = None,
    json: Path | None = None,
    figure: Path | None = None,
) -> None:
    chosen = STUDIES[study]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen.schedules:
            if only and name not in only.split(","):
                continue
            found = []
            for seed in range(seeds):
                place = (folder or Path(scratch)) / f"{study}-{name}-{seed}"
                learn(chosen, name, seed, place)
                found.append(figures(place))
            results[name] = {key: [each[key] for each in found] for key in found[0]}
            means = (f"{key} {fmean(each):.3g} ±{interval(each):.2g}" for key, each in results[name].items())
            print(f"{name:12} {', '.join(means)}", flush=True)
    write(json, results)
    if figure:
        draw(results, figure)


if __name__ == "__main__":
    run(main)
