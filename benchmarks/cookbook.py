"""A recipe of tinker-cookbook, unmodified, on a server of ours: does it learn?

    python benchmarks/cookbook.py [--model FOLDER] [--steps N] [--json FILE]

The recipe is `tinker_cookbook.recipes.math_rl.train env=arithmetic`: sums of two numbers up to 100, with LoRA
of rank 32, 12 groups of 8 samples a step and the loss importance_sampling (its own default, stable_reinforce,
is refused). The server is `tailrace serve --tinker` with one thread a process. `make cookbook` installs what
it needs.

    reward       correct answers, less a tenth for those without the right format: mean of the first and the
                 last TAIL steps
    correct      the share of correct answers in them
    seconds      of a step, by median
"""

import os
import subprocess
import sys
import tempfile
from json import loads
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import run, write

sys.path.append(str(Path(__file__).parents[1] / "tests" / "extras" / "tinker"))
from tinker_cases import KEY, Server

FIGURES = {"reward": "env/all/reward/total", "correct": "env/all/correct"}
TAIL = 5


def train(url: str, model: Path, folder: Path, steps: int) -> list[dict[str, Any]]:
    """The rows of the recipe's metrics, one a step."""
    settings = {
        "env": "arithmetic",
        "model_name": model,
        "renderer_name": "qwen3_instruct",  # ChatML
        "lora_rank": 32,
        "loss_fn": "importance_sampling",
        "base_url": url,
        "group_size": 8,
        "groups_per_batch": 12,
        "learning_rate": 4e-4,
        "max_steps": steps,
        "eval_every": 0,
        "save_every": 0,
        "log_path": folder,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tinker_cookbook.recipes.math_rl.train", *words]
    with (folder.parent / "recipe.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT)
    rows = [loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if FIGURES["reward"] in row]


def main(
    model: Path = Path("models/SmolLM2-135M-Instruct"), steps: int = 60, json: Path | None = None
) -> None:
    model = model.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ("--trainer.lora.rank", "32", "--threads", "1")
        server = Server(model, folder / "state", *options, name=str(model))
        server.start()
        try:
            rows = train(server.url, model, folder / "run", steps)
        finally:
            server.stop()
    found: dict[str, Any] = {"steps": len(rows)}
    for figure, key in FIGURES.items():
        values = [row[key] for row in rows]
        found[figure] = [fmean(values[:TAIL]), fmean(values[-TAIL:])]
    found["seconds"] = median(row["time/total"] for row in rows)
    print(f"{model.name}, cpu, 1 thread a process, {len(rows)} steps of {found['seconds']:.0f} s:")
    for figure in FIGURES:
        first, last = found[figure]
        print(f"  {figure:8} {first:.2f} to {last:.2f}, means of {TAIL} steps")
    write(json, found)


if __name__ == "__main__":
    run(main)
