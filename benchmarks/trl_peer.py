"""TRL's GRPOTrainer beside tailrace: SmolLM2-135M-Instruct learns sums (examples/smollm2), on a CPU.

    make models/SmolLM2-135M-Instruct env-trl
    python benchmarks/trl_peer.py [--steps 8] [--seeds 3] [--cores one|two|both] [--json FILE] [--figure FILE]
                                  [--search]

Not trl.py, which would shadow the package. Both sides have the model, the prompts and their order, 8 prompts
x 8 samples a step, GRPO (mean over samples of the mean over tokens, clip 0.2, no KL), AdamW with learning
rate 2e-5, at most 32 tokens at temperature 1, and the cores. They run in turn. The first of CANDIDATES is
measured; --search measures all of them, with one seed.

    step_s        seconds a step, without the first
    tokens_s      completion tokens a second
    parts         seconds a step of each part; in an overlapping schedule their sum exceeds step_s
    reward, minutes  mean reward of each step, and its end after that of the first step
    zero_groups   share of groups of equal rewards, which tailrace trains without a backward pass
    gradient_s    seconds of forward and backward passes for each sample that had both
    accuracy      share of 128 held-out prompts that the trained model solves, greedy, by one program
    peak_bytes    the largest sum of the processes' proportional set sizes

A ratio is TRL's mean over tailrace's: above 1, tailrace is faster. Neither side computes log-probs of the
old policy: TRL takes those of the forward pass, tailrace those of the engine. TRL's dtype "autocast" is
tailrace's "bfloat16", with float32 weights. With weights in bfloat16 TRL is faster and rounds the updates.

AsyncGRPOTrainer of TRL 1.16 is no candidate: it sends weights to vLLM by NCCL, and vLLM for CPUs answers
"NCCL only supports CUDA and ROCm backends".
"""

import json as jsons
import os
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from common import EXAMPLES, peak_pss, run, write
from tailrace.api import load_config
from tailrace.contracts.data import Split
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.data.open import open_prompts
from tailrace.drivers.data.settings import RowsSettings

SUMS = EXAMPLES / "smollm2"
MODEL = EXAMPLES.parent / "models" / "SmolLM2-135M-Instruct"
TRL_PYTHON = EXAMPLES.parent / ".venv-trl" / "bin" / "python"
GROUPS, GROUP_SIZE, MAX_TOKENS, LEARNING_RATE, HELD_OUT = 8, 8, 32, 2e-5, 128
DEFAULTS = {"max_tokens": MAX_TOKENS, "reward": "near"}
CORES = {"one": "1", "two": "0,1"}
PARTS = {"Accumulated": "passes", "OptimizerStep": "optimizer", "Published": "publish"}
Figures = dict[str, Any]


def threads(number: int, dtype: str) -> Figures:
    """Settings of tailrace: those of its engine and its trainer."""
    values = {"threads": number, "dtype": dtype}
    return {f"{part}.{key}": value for part in ("engine", "trainer") for key, value in values.items()}


TRL: list[Figures] = [{"dtype": dtype} for dtype in ("autocast", "float32", "bfloat16")]
TRL += [{"batch": 8}, {"batch": 32}, {"attention": "eager"}]
OTHERS = ("use_transformers_continuous_batching", "gradient_checkpointing")
TRL += [{"others": {name: True}} for name in OTHERS]
EAGER = {"schedule.name": "rolloutpipe_eager", **threads(1, "bfloat16")}
CANDIDATES: dict[str, dict[str, list[Figures]]] = {
    "one": {"trl": TRL, "tailrace": [threads(1, "bfloat16"), threads(1, "float32")]},
    "two": {"trl": TRL, "tailrace": [threads(2, "bfloat16"), threads(2, "float32"), EAGER]},
}
BEST = {name: {side: tried[0] for side, tried in sides.items()} for name, sides in CANDIDATES.items()}
"""The first of each."""


def missing(model: Path, python: Path) -> list[str]:
    """What is not there, each with the command that makes it."""
    needed = {python: "make env-trl", model / "config.json": "make models/SmolLM2-135M-Instruct"}
    return [f"{path} is missing: {remedy}" for path, remedy in needed.items() if not path.exists()]


def rows(data: RowsSettings, model: Path, number: int, *, seed: int, split: Split) -> list[Figures]:
    """Prompts and answers in tailrace's order."""
    prompts = open_prompts(data, load_tokenizer(model), seed=seed, split=split)
    found = [prompts[index] for index in range(number)]
    return [{"prompt": prompt.given, "answer": prompt.row["answer"]} for prompt in found]


def ask_trl(verb: str, spec: Figures, cores: str, folder: Path) -> Figures:
    """What TRL's side writes, and its peak of memory."""
    asked, given = folder / "spec.json", folder / "result.json"
    words = {"threads": len(cores.split(",")), **DEFAULTS, **spec}
    asked.write_text(jsons.dumps(words), encoding="utf-8")
    command = ["taskset", "-c", cores, str(TRL_PYTHON), "-P", str(Path(__file__).with_name("trl_grpo.py"))]
    command += [verb, str(asked), str(given)]
    peak = peak_pss(command, os.environ | {"HF_HUB_OFFLINE": "1"}, period_s=1)
    return {"peak_bytes": peak, **jsons.loads(given.read_text(encoding="utf-8"))}


def learning_curve(path: Path, settings: Figures, parameters: Figures, samples: int, folder: Path) -> Figures:
    """What learning.py keeps of a run of TRL on the task of a config, on one core, with the accuracy of
    `tailrace eval`. The run begins anew after a stop.

    Args:
        settings: of the config, by key.
        parameters: groups_per_step, learning_rate, max_tokens.
    """
    config = load_config(path, settings)
    assert config.model and isinstance(config.data, RowsSettings)
    model, size, groups = Path(config.model.path), config.run.group_size, parameters["groups_per_step"]
    if problems := missing(model, TRL_PYTHON):
        sys.exit("\n".join(problems))
    folder.mkdir(parents=True, exist_ok=True)
    steps, trained, answer = samples // (groups * size), folder / "model", folder / "accuracy.json"
    spec = {**parameters, "model": str(model), "folder": str(trained), "settings": {}, "reward": "exact"}
    spec |= {"steps": steps, "seed": config.run.seed, "group_size": size, "groups": groups}
    spec["rows"] = rows(config.data, model, steps * groups, seed=config.run.seed, split="train")
    result = ask_trl("train", spec, CORES["one"], folder)
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command = ["taskset", "-c", CORES["one"], sys.executable, "-m", "tailrace.cli", "eval", str(path)]
    command += ["--model", str(trained), "--json", str(answer), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    accuracy = jsons.loads(answer.read_text(encoding="utf-8"))["accuracy"]
    return {
        "curve": curve_of(result, groups * size),
        "evaluations": [[samples, accuracy]],
        "peak_bytes": result["peak_bytes"],
    }


def curve_of(result: Figures, per_step: int) -> Figures:
    """The curve of what TRL's side writes. `per_step`: samples of a step; all are trained."""
    steps = result["steps"]
    samples = [per_step * number for number in range(1, len(steps) + 1)]
    curve = {"samples": samples, "generated": samples}
    curve["generated_tokens"] = list(accumulate(step["tokens"] for step in steps))
    curve["seconds"] = [round(step["end_s"] - result["begin_s"], 1) for step in steps]
    curve["reward"] = [round(step["reward"], 4) for step in steps]
    curve["length"] = [round(step["tokens"] / per_step, 2) for step in steps]
    return curve


def tailrace_steps(folder: Path) -> list[Figures]:
    """What trl_grpo.py writes of each step, from the files of a run."""
    found = map(jsons.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    events = list(map(jsons.loads, (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()))
    steps: list[Figures] = []
    for row in (row for row in found if "loss" in row):
        begin, zero = steps[-1]["end_s"] if steps else 0.0, row["frac_reward_zero_std"]
        parts = {"generation": row["round/rollout_time_s"]}
        for event in events:
            if event["event"] in PARTS and begin < event["end_s"] <= row["time"]:
                part = PARTS[event["event"]]
                parts[part] = parts.get(part, 0.0) + event["end_s"] - event["start_s"]
        sums = {"tokens": row["tokens/trained"], "passes": row["samples/trained"] * (1 - zero)}
        shares = {"reward": row["reward"], "zero_groups": zero}
        steps.append({"end_s": row["time"], "parts": parts, **sums, **shares})
    return steps


def figures(steps: list[Figures]) -> Figures:
    """The figures of one run, from its second step on."""
    later, seconds = steps[1:], steps[-1]["end_s"] - steps[0]["end_s"]
    parts = {name: fmean(step["parts"][name] for step in later) for name in later[0]["parts"]}
    return {
        "step_s": seconds / len(later),
        "tokens_s": sum(step["tokens"] for step in later) / seconds,
        "parts": parts,
        "reward": [step["reward"] for step in steps],
        "minutes": [(step["end_s"] - steps[0]["end_s"]) / 60 for step in steps],
        "zero_groups": fmean(step["zero_groups"] for step in later),
        "gradient_s": parts["passes"] / fmean(step["passes"] for step in later),
    }


def ratio(runs: dict[str, list[Figures]], name: str) -> float:
    """TRL's mean of a figure over tailrace's."""
    return fmean(each[name] for each in runs["trl"]) / fmean(each[name] for each in runs["tailrace"])


def measure(side: str, settings: Figures, cores: str, model: Path, steps: int, seed: int) -> Figures:
    """Train with one side, then evaluate its model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, data = Path(scratch, "run"), load_config(SUMS / "first_run.toml").data
        assert isinstance(data, RowsSettings)
        if side == "trl":
            spec = {"model": str(model), "folder": str(folder), "settings": settings, "steps": steps}
            spec |= {"seed": seed, "learning_rate": LEARNING_RATE, "group_size": GROUP_SIZE, "groups": GROUPS}
            spec["rows"] = rows(data, model, GROUPS * steps, seed=seed, split="train")
            result = ask_trl("train", spec, cores, Path(scratch))
            found = {"peak_bytes": result["peak_bytes"], **figures(result["steps"])}
        else:
            keys = {"run.rounds": steps, "run.seed": seed, "run.group_size": GROUP_SIZE, **settings}
            keys |= {"trainer.learning_rate": LEARNING_RATE, "sampling.max_completion_tokens": MAX_TOKENS}
            keys |= {"model.path": model.resolve(), "schedule.groups_per_step": GROUPS}
            keys["schedule.groups_per_round"] = GROUPS
            command = ["taskset", "-c", cores, sys.executable, "-m", "tailrace.cli", "train"]
            command += [str(SUMS / "first_run.toml"), "--output-dir", str(folder)]
            command += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
            found = {"peak_bytes": peak_pss(command, period_s=1), **figures(tailrace_steps(folder))}
            folder /= "model"
        asked = {"model": str(folder), "rows": rows(data, model, HELD_OUT, seed=0, split="eval")}
        found["accuracy"] = ask_trl("evaluate", asked, cores, Path(scratch))["accuracy"]
    print(side, settings, found, flush=True)
    return {**found, "settings": settings}


def main(
    model: Path = MODEL,
    steps: int = 8,
    seeds: int = 3,
    cores: Literal["one", "two", "both"] = "both",
    search: bool = False,
    json: Path | None = None,
    figure: Path | None = None,
) -> None:
    if problems := missing(model, TRL_PYTHON):
        sys.exit("\n".join(problems))
    if search and figure:
        sys.exit("--figure shows one setting of each side: leave --search out")
    if steps < 2 or seeds < 1:
        sys.exit("--steps must be 2 or more, because the first is left out; --seeds 1 or more")
    subprocess.run([sys.executable, SUMS / "make_sums.py"], check=True)
    results: Figures = {"accuracy": {}, "gradient": {}, "runs": {}}
    for name in CORES if cores == "both" else [cores]:
        runs: dict[str, list[Figures]] = {"trl": [], "tailrace": []}
        for turn in range(max(map(len, CANDIDATES[name].values())) if search else seeds):
            for side, found in runs.items():
                tried = CANDIDATES[name][side][turn : turn + 1] if search else [BEST[name][side]]
                seed = 0 if search else turn
                found += [measure(side, settings, CORES[name], model, steps, seed) for settings in tried]
        results["runs"][name] = runs
        if not search:
            key = {"one": "one_core", "two": "two_cores"}[name]
            results[key], results["gradient"][key] = ratio(runs, "step_s"), ratio(runs, "gradient_s")
            results["accuracy"][key] = {
                side: fmean(each["accuracy"] for each in found) for side, found in runs.items()
            }
            print({key: results[key], "gradient": results["gradient"], "accuracy": results["accuracy"]})
    write(json, results)
    if figure:
        draw(results["runs"], figure)


def draw(runs: dict[str, dict[str, list[Figures]]], path: Path) -> None:
    """The reward over minutes, mean over the seeds."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    picture, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for cores, sides in runs.items():
        for side, found in sides.items():
            minutes, rewards = (
                [fmean(step) for step in zip(*(each[key] for each in found), strict=True)]
                for key in ("minutes", "reward")
            )
            axes.plot(minutes, rewards, marker="o", label=f"{side}, cores: {cores}")
    axes.set(xlabel="minutes after the first step", ylabel="mean reward", ylim=(0, 1))
    axes.legend()
    picture.savefig(path, dpi=150)


if __name__ == "__main__":
    run(main)
