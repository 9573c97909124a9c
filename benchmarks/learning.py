"""What schedules learn from equally many samples, from several seeds.

    python benchmarks/learning.py [lag|april|order|kv|episodes] [--seeds 3] [--samples N] [--folder DIR]
                                  [--figure F]

lag    in-flight updates against conventional RL with G = 8, 16, 32 and 64 steps a round (PipelineRL,
       Figs. 5a, 5b, 6b and 10), with its loss: REINFORCE, token weights truncated at 5
april  april against serial (APRIL, Tables 2 and 5 to 7)
order  rolloutpipe, which trains short groups first, against serial
kv     pipelinerl with the KV cache kept, recomputed at each publication, or recomputed on drift
episodes  pipelinerl against serial: updates within episodes of several turns (PipelineRL 7); the model and
       the task are those of examples/tools.toml

Each run trains the quickstart's model on as many samples as the others of its study. Printed, mean over the
seeds and the half-width of its 95% interval (Student's t): the reward of the samples of each eighth of the
run, held-out accuracy at the end, effective sample size, KL of the behaviour policy, largest and mean lag in
optimizer steps, versions of the weights in a sample, share of the steps after which the KV cache was
recomputed, waste and seconds. Seconds hold for one engine and one trainer of one thread each. --folder keeps
the runs, and a run that has ended there is not repeated.
"""

import json as jsons
import tempfile
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from common import EXAMPLES, QUICKSTART, run, write
from tailrace.api import load_config, train

PARTS = 8


class Study(NamedTuple):
    """What is compared: settings of all runs, and the schedule of each."""

    settings: dict[str, str]
    schedules: dict[str, dict[str, Any]]
    config: Path = QUICKSTART


WHOLE = {"groups_per_round": 32, "groups_per_step": 16}
RING = {"groups_per_step": 4, "in_flight_per_engine": 64, "ring_groups": 8}
STUDIES = {
    "lag": Study(
        {"algorithm.name": "reinforce", "trainer.learning_rate": "2e-4"},
        {"pipelinerl": {"name": "pipelinerl", **RING}}
        | {
            f"G={steps}": {"name": "conventional", "groups_per_step": 4, "steps_per_round": steps}
            for steps in (8, 16, 32, 64)
        },
    ),
    "april": Study(
        {},
        {
            "serial": {"name": "serial", **WHOLE, "groups_per_step": 32},  # april steps once a round
            "april": {"name": "april", "groups_per_round": 32, "groups_launched": 64},
        },
    ),
    "order": Study(
        {"trainer.learning_rate": "2e-4"},
        {name: {"name": name, **WHOLE, "groups_per_step": 4} for name in ("serial", "rolloutpipe")},
    ),
    "kv": Study(
        {"algorithm.name": "reinforce", "trainer.learning_rate": "2e-4"},
        {f"kv={kv}": {"name": "pipelinerl", **RING, "kv": kv} for kv in ("keep", "recompute", 0.01)},
    ),
    "episodes": Study(
        {"trainer.learning_rate": "2e-4"},
        {
            "serial": {"name": "serial", "groups_per_round": 8, "groups_per_step": 8},
            "pipelinerl": {"name": "pipelinerl", **RING, "groups_per_step": 8, "ring_groups": 16},
        },
        EXAMPLES / "tools.toml",
    ),
}


def learn(study: Study, name: str, samples: int, seed: int, folder: Path) -> None:
    """Train the model of the study; the files of the run are in the folder."""
    if (folder / "summary.json").exists():
        return
    schedule = study.schedules[name]
    groups = schedule.get(
        "groups_per_round", schedule.get("groups_per_step", 1) * schedule.get("steps_per_round", 1)
    )
    rounds = samples // load_config(study.config).run.group_size // groups
    always = {"run.seed": seed, "run.rounds": rounds, "run.eval_every": rounds, "run.checkpoint_every": 0}
    config = load_config(study.config, {**always, **study.settings})
    train(config.model_copy(update={"schedule": schedule}), folder)


def figures(folder: Path) -> dict[str, float]:
    """What is compared of one run."""
    rows = [jsons.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    samples = [row["samples/trained"] for row in steps]
    parts: list[list[tuple[float, float]]] = [[] for _ in range(PARTS)]
    trained = 0.0
    for row, number in zip(steps, samples, strict=True):
        parts[min(PARTS - 1, int(PARTS * trained / sum(samples)))].append((row["reward"], number))
        trained += number
    if not all(parts):
        raise SystemExit(f"a run of {len(steps)} steps has an eighth without one; raise --samples")
    found = {
        f"reward/{place}": sum(reward * number for reward, number in part) / sum(number for _, number in part)
        for place, part in enumerate(parts, 1)
    }
    wasted = sum(value for row in rows for key, value in row.items() if key.startswith("tail/wasted_tokens/"))
    return {
        **found,
        "accuracy": [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1],
        "ess": fmean(row["ess"] for row in steps),
        "kl": fmean(row["mismatch_kl"] for row in steps),
        "lag": max(row["lag/max"] for row in steps),
        "lag_mean": fmean(row["lag/mean"] for row in steps),
        "versions": fmean(row["versions/mean"] for row in steps),
        "recomputed": sum(row.get("kv/recomputed", 0.0) for row in rows) / len(steps),
        "waste": wasted / sum(row.get("tokens/generated", 0.0) for row in rows),
        "samples": sum(samples),
        "seconds": sum(row.get("round/time_s", 0.0) for row in rows),
    }


def interval(values: list[float]) -> float:
    """Half the width of the 95% interval of the mean; 0 with one value."""
    from scipy.stats import t

    return (
        float(t.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    )


def draw(results: dict[str, dict[str, list[float]]], samples: int, path: Path) -> None:
    """The reward over samples of each run, with its interval."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    places = [(number + 0.5) / PARTS * samples for number in range(PARTS)]
    for name, found in results.items():
        rewards = [found[f"reward/{number}"] for number in range(1, PARTS + 1)]
        axes.errorbar(places, list(map(fmean, rewards)), list(map(interval, rewards)), label=name, capsize=3)
    axes.set(xlabel="trained samples", ylabel="reward")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(
    study: Literal["lag", "april", "order", "kv", "episodes"] = "lag",
    seeds: int = 3,
    samples: int = 8192,
    folder: Path | None = None,
    json: Path | None = None,
    figure: Path | None = None,
) -> None:
    chosen = STUDIES[study]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen.schedules:
            found = []
            for seed in range(seeds):
                place = (folder or Path(scratch)) / f"{study}-{name}-{seed}"
                learn(chosen, name, samples, seed, place)
                found.append(figures(place))
            results[name] = {key: [each[key] for each in found] for key in found[0]}
            means = (f"{key} {fmean(each):.3g} ±{interval(each):.2g}" for key, each in results[name].items())
            print(f"{name:12} {', '.join(means)}", flush=True)
    write(json, results)
    if figure:
        draw(results, samples, figure)


if __name__ == "__main__":
    run(main)
