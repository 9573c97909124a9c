"""Recipes of tinker-cookbook, unmodified and with the losses that they choose, on a server: do they learn?

    make env-tinker env-cookbook models/SmolLM2-135M-Instruct
    PYTHONPATH=.tinker:.cookbook python benchmarks/cookbook.py [--only NAME] [--steps N] [--json FILE]

    math_rl.train env=arithmetic         sums of two numbers up to 100; its loss: stable_reinforce
    multiplayer_rl.guess_number.train    episodes of ten turns; its loss: importance_sampling

Both have LoRA of rank 32. The server is `tailrace serve --tinker
--own-stable-reinforce` with one thread a process: Tinker's formula of that loss is not public.

    reward       mean of the first and the last TAIL steps
    correct      of the sums: the share of correct answers in them
    seconds      of a step, by median
"""

import os
import subprocess
import sys
import tempfile
from json import loads
from pathlib import Path
from statistics import fmean, median
from subprocess import PIPE, STDOUT
from typing import Any

from common import run, write

sys.path.append(str(Path(__file__).parents[1] / "tests" / "extras" / "tinker"))
from tinker_cases import KEY, Server

FIGURES = {"reward": "env/all/reward/total", "correct": "env/all/correct"}
TAIL = 5
RECIPES: dict[str, tuple[int, dict[str, Any]]] = {
    "math_rl": (
        60,
        {
            "group_size": 8,
            "env": "arithmetic",
            "groups_per_batch": 12,
            "learning_rate": 4e-4,
            "save_every": 0,
        },
    ),
    "multiplayer_rl.guess_number": (
        4,
        {"group_size": 8, "batch_size": 4, "learning_rate": 4e-4, "save_every": 0},
    ),
}
"""Steps, and settings of size. No setting is of the loss."""


def train(recipe: str, url: str, model: Path, folder: Path, steps: int) -> list[dict[str, Any]]:
    """The rows of the recipe's metrics, one a step."""
    settings = {
        "model_name": model,
        "renderer_name": "qwen3_instruct",  # ChatML
        "max_steps": steps,
        "eval_every": 0,
        "log_path": folder,
        **RECIPES[recipe][1],
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "TINKER_BASE_URL": url, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}.train", *words]
    done = subprocess.run(command, env=environment, stdout=PIPE, stderr=STDOUT, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{recipe} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    rows = [loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if FIGURES["reward"] in row]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": len(rows), "seconds": median(row["time/total"] for row in rows)}
    tail = min(TAIL, (len(rows) + 1) // 2)
    for figure, key in FIGURES.items():
        if values := [row[key] for row in rows if key in row]:
            found[figure] = [fmean(values[:tail]), fmean(values[-tail:])]
    return found


def main(
    model: Path = Path("models/SmolLM2-135M-Instruct"),
    only: str | None = None,
    steps: int | None = None,
    json: Path | None = None,
) -> None:
    model, found = model.resolve(), {}
    for recipe in [only] if only else RECIPES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            options = ("--trainer.lora.rank", "32", "--threads", "1", "--own-stable-reinforce")
            server = Server(model, folder / "state", *options, name=str(model))
            server.start()
            try:
                rows = train(recipe, server.url, model, folder / "run", steps or RECIPES[recipe][0])
            finally:
                server.stop()
        found[recipe] = figures = summary(rows)
        print(f"{recipe}: {model.name}, cpu, 1 thread a process, {len(rows)} steps:")
        for figure in FIGURES.keys() & figures.keys():
            first, last = figures[figure]
            print(f"  {figure:8} {first:.2f} to {last:.2f}, the first and the last steps")
        print(f"  seconds  {figures['seconds']:.0f}", flush=True)
    write(json, found)


if __name__ == "__main__":
    run(main)
