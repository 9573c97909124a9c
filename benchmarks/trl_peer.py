"""TRL's GRPOTrainer beside tailrace: SmolLM2-135M-Instruct learns sums (examples/smollm2), on a CPU.

    make models/SmolLM2-135M-Instruct .venv-trl/stamp
    python benchmarks/trl_peer.py [--steps 8] [--seeds 3] [--cores one|two|both] [--json FILE] [--search]

Not trl.py, which would shadow the package. Both sides have the model, the prompts and their order, 8 prompts
x 8 samples a step, GRPO (mean over samples of the mean over tokens, clip 0.2, no KL), AdamW with learning rate
2e-5, at most 32 tokens at temperature 1, and the cores. They run in turn. --search times each candidate of
both sides instead, with one seed; BEST has the fastest of them.

    step_s           seconds a step, without the first
    tokens_s         completion tokens a second
    parts            seconds a step of each part; in an overlapping schedule they add up to more than step_s
    accuracy         held-out prompts, of 128, that the trained model solves: greedy, by one program for both
    peak_bytes       the largest sum of the processes' proportional set sizes
    zero_groups      share of groups with equal rewards: tailrace trains them without a backward pass
    gradient_s       seconds of forward and backward passes for each sample that had them

Ratios are TRL's mean over tailrace's: above 1, tailrace is faster. No side computes log-probs of the old policy:
TRL takes those of the forward pass, tailrace those of the engine.

AsyncGRPOTrainer of TRL 1.16 is not among the candidates. ASYNC
"""

import json as jsons
import os
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from common import EXAMPLES, peak_pss, run, write
from tailrace.api import load_config
from tailrace.data.encoding import load_tokenizer
from tailrace.data.open import open_prompts

ROOT = Path(__file__).parents[1]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
CONFIG = EXAMPLES / "smollm2" / "first_run.toml"
GROUPS, GROUP_SIZE, MAX_TOKENS, LEARNING_RATE, HELD_OUT = 8, 8, 32, 2e-5, 128
CORES = {"one": "1", "two": "0,1"}
Settings = dict[str, Any]

TRL = {"batch": 16, "dtype": "autocast", "attention": "sdpa"}
TRL_CANDIDATES: list[Settings] = [
    TRL,
    *({**TRL, "batch": batch} for batch in (8, 32, 64)),
    {**TRL, "dtype": "float32"},
    {**TRL, "dtype": "pure bfloat16"},
    {**TRL, "attention": "eager"},
    {**TRL, "cache": "static"},
    {**TRL, "continuous": True},
    {**TRL, "checkpointing": True},
]
SERIAL = {"name": "serial", "dtype": "bfloat16"}
TAILRACE_CANDIDATES: dict[str, list[Settings]] = {
    "one": [SERIAL, {**SERIAL, "dtype": "float32"}],
    "two": [
        {**SERIAL, "threads": 2},
        {**SERIAL, "threads": 2, "dtype": "float32"},
        *({"name": name, "dtype": "bfloat16"} for name in ("rolloutpipe_eager", "one_step_off")),
    ],
}
BEST: dict[str, dict[str, Settings]] = {
    "one": {"trl": TRL, "tailrace": SERIAL},
    "two": {"trl": TRL, "tailrace": {**SERIAL, "threads": 2}},
}


def missing(model: Path) -> list[str]:
    """What is not there, and the command that makes it."""
    needed = {TRL_PYTHON: "make .venv-trl/stamp", model / "config.json": "make models/SmolLM2-135M-Instruct"}
    return [f"{path} is missing: {remedy}" for path, remedy in needed.items() if not path.exists()]


def overrides(model: Path, settings: Settings, steps: int, seed: int) -> dict[str, Any]:
    """The settings of a run of tailrace, by dotted key."""
    size = {"rounds": steps, "seed": seed, "group_size": GROUP_SIZE, "eval_every": 0, "checkpoint_every": 0}
    found: dict[str, Any] = {f"run.{key}": value for key, value in size.items()}
    found |= {"model.path": model.resolve(), "trainer.learning_rate": LEARNING_RATE}
    found |= {"sampling.max_completion_tokens": MAX_TOKENS, "schedule.name": settings["name"]}
    for part in ("engine", "trainer"):
        found |= {f"{part}.dtype": settings["dtype"], f"{part}.threads": settings.get("threads", 1)}
    return found


def rows(model: Path, number: int, *, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """Prompts and answers, in the order in which tailrace draws them."""
    config = load_config(CONFIG)
    tokenizer = load_tokenizer(model)
    prompts = open_prompts(config.data, tokenizer, seed=seed, split="eval" if held_out else "train")
    found = [prompts[index] for index in range(number)]
    return [{"prompt": prompt.given, "answer": prompt.row["answer"]} for prompt in found]


def trl(mode: str, spec: Settings, cores: str, folder: Path) -> tuple[dict[str, Any], int]:
    """Run TRL's side. Returns its result and its peak of memory."""
    asked, given = folder / "spec.json", folder / "result.json"
    asked.write_text(jsons.dumps({"threads": cores.count(",") + 1, "max_tokens": MAX_TOKENS, **spec}))
    command = ["taskset", "-c", cores, str(TRL_PYTHON), "-P", str(Path(__file__).with_name("trl_grpo.py"))]
    peak = peak_pss([*command, mode, str(asked), str(given)], os.environ | {"HF_HUB_OFFLINE": "1"})
    return jsons.loads(given.read_text()), peak


def trl_figures(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of TRL's side, from the second step on."""
    first, last, later = steps[0], steps[-1], steps[1:]
    seconds = last["end_s"] - first["end_s"]
    parts = {part: (last["parts"][part] - first["parts"][part]) / len(later) for part in last["parts"]}
    groups = [
        step["rewards"][at : at + GROUP_SIZE]
        for step in later
        for at in range(0, len(step["rewards"]), GROUP_SIZE)
    ]
    return {
        "step_s": seconds / len(later),
        "tokens_s": sum(step["tokens"] for step in later) / seconds,
        "parts": parts,
        "reward": [fmean(step["rewards"]) for step in steps],
        "zero_groups": fmean(len(set(group)) == 1 for group in groups),
        "gradient_s": (parts["forward"] + parts["backward"]) / len(steps[0]["rewards"]),
    }


def tailrace_figures(folder: Path) -> dict[str, Any]:
    """The figures of tailrace's side, from the second step on."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(jsons.loads, lines) if "loss" in row]
    begin, later = steps[0]["time"], steps[1:]
    seconds = steps[-1]["time"] - begin
    parts = {"generation": sum(row.get("round/rollout_time_s", 0.0) for row in later)}
    names = {"Accumulated": "forward and backward", "OptimizerStep": "optimizer", "Published": "publish"}
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = jsons.loads(line)
        if event["event"] in names and event["start_s"] >= begin and event["end_s"] <= steps[-1]["time"]:
            part = names[event["event"]]
            parts[part] = parts.get(part, 0.0) + event["end_s"] - event["start_s"]
    zero = fmean(row["frac_reward_zero_std"] for row in later)
    trained = sum(row["samples/trained"] for row in later) * (1 - zero)
    return {
        "step_s": seconds / len(later),
        "tokens_s": sum(row["tokens/trained"] for row in later) / seconds,
        "parts": {part: spent / len(later) for part, spent in parts.items()},
        "reward": [row["reward"] for row in steps],
        "zero_groups": zero,
        "gradient_s": parts["forward and backward"] / trained,
    }


def measure(side: str, settings: Settings, cores: str, model: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train with one side; its figures."""
    with tempfile.TemporaryDirectory() as scratch:
        trained = Path(scratch, "run")
        if side == "trl":
            spec = {
                "model": str(model),
                "settings": settings,
                "steps": steps,
                "seed": seed,
                "folder": str(trained),
            }
            spec |= {"learning_rate": LEARNING_RATE, "group_size": GROUP_SIZE, "samples": GROUPS * GROUP_SIZE}
            spec["rows"] = rows(model, GROUPS * steps, seed=seed, held_out=False)
            result, peak = trl("train", spec, cores, Path(scratch))
            found = trl_figures(result["steps"])
        else:
            command = ["taskset", "-c", cores, sys.executable, "-m", "tailrace.cli", "train", str(CONFIG)]
            for key, value in overrides(model, settings, steps, seed).items():
                command += [f"--{key}", str(value)]
            peak = peak_pss([*command, "--output-dir", str(trained)])
            found = tailrace_figures(trained)
            trained /= "model"
        asked = {"model": str(trained), "rows": rows(model, HELD_OUT, seed=0, held_out=True)}
        accuracy, _ = trl("evaluate", asked, cores, Path(scratch))
    found |= {"peak_bytes": peak, **accuracy}
    print(side, settings, {key: value for key, value in found.items() if key != "reward"}, flush=True)
    return {**found, "settings": settings}


def compared(sides: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """TRL's mean over tailrace's of step_s and gradient_s."""
    return {
        key: fmean(found[key] for found in sides["trl"]) / fmean(found[key] for found in sides["tailrace"])
        for key in ("step_s", "gradient_s")
    }


def main(
    model: Path = MODEL,
    steps: int = 8,
    seeds: int = 3,
    cores: Literal["one", "two", "both"] = "both",
    search: bool = False,
    json: Path | None = None,
) -> None:
    if problems := missing(model):
        sys.exit("\n".join(problems))
    if steps < 2:
        sys.exit("--steps: at least 2, because the first step is left out")
    peak_pss([sys.executable, str(EXAMPLES / "smollm2" / "make_sums.py")])
    results: dict[str, Any] = {"accuracy": {}, "runs": {}}
    for name in CORES if cores == "both" else [cores]:
        tried = {"trl": TRL_CANDIDATES, "tailrace": TAILRACE_CANDIDATES[name]}
        chosen = tried if search else {side: [BEST[name][side]] * seeds for side in tried}
        sides: dict[str, list[dict[str, Any]]] = {side: [] for side in chosen}
        for turn in range(max(map(len, chosen.values()))):
            for side, found in sides.items():
                if turn < len(chosen[side]):
                    seed = 0 if search else turn
                    found.append(measure(side, chosen[side][turn], CORES[name], model, steps, seed))
        results["runs"][f"{name}_core{'s' * (name == 'two')}"] = sides
        if not search:
            ratios = compared(sides)
            results[f"{name}_core{'s' * (name == 'two')}"] = ratios["step_s"]
            print(
                f"{name}: tailrace is {ratios['step_s']:.2f} x as fast as TRL; passes {ratios['gradient_s']:.2f} x"
            )
            results["accuracy"][name] = {
                side: fmean(each["accuracy"] for each in found) for side, found in sides.items()
            }
    write(json, results)


if __name__ == "__main__":
    run(main)
