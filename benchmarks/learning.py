"""What schedules learn from equally many samples, from several seeds.

    python benchmarks/learning.py [lag|april|order|kv|episodes|groups|real] [--seeds 3] [--samples N]
                                  [--only NAME,NAME] [--folder DIR] [--figure F]

lag    in-flight updates against conventional RL with G = 8, 16, 32 and 64 steps a round (PipelineRL,
       Figs. 5a, 5b, 6b and 10), with its loss: REINFORCE, token weights truncated at 5
april  april against serial (APRIL, Tables 2 and 5 to 7)
order  rolloutpipe, which trains short groups first, against serial
kv     pipelinerl with the KV cache kept, recomputed at each publication, or recomputed on drift
episodes  pipelinerl against serial: updates within episodes of several turns (PipelineRL 7); the model and
       the task are those of examples/tools.toml
groups  groups of 8 (GRPO) against the first 4 of 8 to end, and against one sample a prompt with an advantage
       over the step (2606.17250), each with 128 samples a step
real   ten schedules on SmolLM2-135M and sums with a long tail of lengths (examples/smollm2/long_tail.toml);
       tailbatch and rollpacker also train the prompts that they have deferred, in one more round

Each run trains the model of its study, the quickstart's unless another is named, on as many samples as the
others. Printed, mean over the seeds and the half-width of its 95% interval (Student's t): the reward of the
samples of each eighth of the run and the seconds until its end, without publications, held-out accuracy at
the start and at the end, effective sample size, KL of the behaviour policy, largest and mean lag in optimizer
steps, versions of the weights in a sample, share of the steps after which the KV cache was recomputed, mean
length of the trained responses, the spread of the steps' means over their mean, waste, samples and seconds.
Seconds hold for one engine and one trainer on two cores: each has one, or both in turn where the schedule
never trains while it generates. --folder keeps the runs, and a run that has ended there is not repeated.
"""

import json as jsons
import tempfile
from math import sqrt
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any, Literal, NamedTuple

from common import EXAMPLES, QUICKSTART, run, write
from tailrace.api import load_config, train

PARTS = 8


class Study(NamedTuple):
    """What is compared: settings of all runs, and the schedule of each."""

    settings: dict[str, str]
    schedules: dict[str, dict[str, Any]]
    config: Path = QUICKSTART
    own: dict[str, dict[str, str]] = {}
    """Settings of single runs."""

    def settings_of(self, name: str) -> dict[str, str]:
        return {**self.settings, **self.own.get(name, {})}


WHOLE = {"groups_per_round": 32, "groups_per_step": 16}
STEP, ROUND = {"groups_per_step": 8}, {"groups_per_round": 8}
RACE = {**ROUND, "prompt_speculation": 1.25, "response_speculation": 1.0}
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
    "groups": Study(
        {},
        {
            "GRPO": {"name": "serial", **WHOLE},
            "4 of 8": {"name": "serial", "groups_per_round": 64, "groups_per_step": 32},
            "one sample": {"name": "serial", "groups_per_round": 256, "groups_per_step": 128},
        },
        own={
            "4 of 8": {"run.groups.keep": "4"},
            "one sample": {"run.group_size": "1", "algorithm.name": "one_sample"},
        },
    ),
    "real": Study(
        {},
        {
            "serial": {"name": "serial", **STEP, **ROUND},
            "rolloutpipe": {"name": "rolloutpipe", **STEP, "groups_per_round": 16},
            "conventional": {"name": "conventional", **STEP, "steps_per_round": 2},
            "april": {"name": "april", **ROUND, "groups_launched": 12},
            "pipelinerl": {
                "name": "pipelinerl",
                **STEP,
                "in_flight_per_engine": 96,
                "ring_groups": 16,
                "ring_full": "block",
            },
            "tailrace": {"name": "tailrace", **STEP, "groups_in_flight": 12, "staleness": 2},
            "one_step_off": {"name": "one_step_off", **STEP, **ROUND},
            "tailbatch": {"name": "tailbatch", **RACE},
            "rollpacker": {"name": "rollpacker", **RACE},
            "tailrace_on_policy": {
                "name": "tailrace_on_policy",
                **ROUND,
                "prompt_speculation": 1.0,
                "rounds_sorted": 4,  # of 8 rounds: a batch that the run's end cuts is trained to its end
            },
        },
        EXAMPLES / "smollm2" / "long_tail.toml",
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
    settings = study.settings_of(name)
    rounds = samples // load_config(study.config, settings).run.num_trained // groups
    always = {"run.seed": seed, "run.rounds": rounds, "run.eval_every": rounds, "run.checkpoint_every": 0}
    config = load_config(study.config, {**always, **settings})
    train(config.model_copy(update={"schedule": schedule}), folder)


def figures(folder: Path) -> dict[str, float]:
    """What is compared of one run."""
    rows = [jsons.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "loss" in row]
    samples = [row["samples/trained"] for row in steps]
    parts: list[list[tuple[float, float]]] = [[] for _ in range(PARTS)]
    trained, seconds, until = 0.0, 0.0, [0.0] * PARTS
    for row, number in zip(steps, samples, strict=True):
        part = min(PARTS - 1, int(PARTS * trained / sum(samples)))
        parts[part].append((row["reward"], number))
        trained, seconds = trained + number, seconds + row["time/step"]
        until[part] = seconds
    if not all(parts):
        raise SystemExit(f"a run of {len(steps)} steps has an eighth without one; raise --samples")
    found = {
        f"reward/{place}": sum(reward * number for reward, number in part) / sum(number for _, number in part)
        for place, part in enumerate(parts, 1)
    }
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    lengths = [row["tokens/trained"] / number for row, number in zip(steps, samples, strict=True)]
    wasted = sum(value for row in rows for key, value in row.items() if key.startswith("tail/wasted_tokens/"))
    return {
        **found,
        **{f"seconds/{place}": value for place, value in enumerate(until, 1)},
        "accuracy/start": accuracies[0],
        "accuracy": accuracies[-1],
        "ess": fmean(row["ess"] for row in steps),
        "kl": fmean(row["mismatch_kl"] for row in steps),
        "lag": max(row["lag/max"] for row in steps),
        "lag_mean": fmean(row["lag/mean"] for row in steps),
        "versions": fmean(row["versions/mean"] for row in steps),
        "recomputed": sum(row.get("kv/recomputed", 0.0) for row in rows) / len(steps),
        "length": sum(row["tokens/trained"] for row in steps) / sum(samples),
        "spread": pstdev(lengths) / fmean(lengths),
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
    """The reward of each run, with its interval, over samples and over seconds."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    places = [(number + 0.5) / PARTS * samples for number in range(PARTS)]
    for name, found in results.items():
        rewards, seconds = (
            [found[f"{key}/{number}"] for number in range(1, PARTS + 1)] for key in ("reward", "seconds")
        )
        means = list(map(fmean, rewards))
        line, *_ = left.errorbar(places, means, list(map(interval, rewards)), label=name, capsize=3)
        right.plot(list(map(fmean, seconds)), means, color=line.get_color(), marker="o", markersize=3)
    left.set(xlabel="trained samples", ylabel="reward", ylim=(0, 1))  # intervals of two seeds exceed it
    right.set(xlabel="seconds of training")
    figure.legend(fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=100)
    Image.open(path).quantize(64).save(path, optimize=True)  # few colours: a third of the bytes


def main(
    study: Literal["lag", "april", "order", "kv", "episodes", "groups", "real"] = "lag",
    seeds: int = 3,
    samples: int = 8192,
    only: str = "",
    folder: Path | None = None,
    json: Path | None = None,
    figure: Path | None = None,
) -> None:
    chosen = STUDIES[study]
    names = only.split(",") if only else list(chosen.schedules)
    if unknown := set(names) - set(chosen.schedules):
        raise SystemExit(
            f"--only: {', '.join(unknown)}: not in {study}; it has {', '.join(chosen.schedules)}"
        )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
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
