"""Whether the quickstart learns, and whether it learns from the reward.

    python benchmarks/learning.py [--seeds 3] [--rounds N] [--json F]

Trains the quickstart's model from several seeds, each time with the task's reward and with a control: the
same rewards, assigned to other responses. Prints the held-out accuracy before and after. The accuracy of the
control must not rise.
"""

import argparse
import json
import math
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from tailrace.commands.evaluate import evaluate_model
from tailrace.commands.train import train
from tailrace.config import load_config
from tailrace.data.base import ProceduralSettings
from tailrace.data.procedural import Task

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart" / "quickstart.toml"
HELD_BACK = 256
"""Scores that the control keeps and assigns at random."""

_scores: list[float] = []
_chance = random.Random(0)
_task: Task | None = None


def shuffled(completion: str, metadata: Mapping[str, object], **row: object) -> float:
    """The score of an earlier response, drawn at random: the distribution of the rewards stays the same."""
    global _task
    if _task is None:
        settings = load_config(QUICKSTART).data
        assert isinstance(settings, ProceduralSettings)
        _task = Task(settings)
    _scores.append(_task.score(completion, {"metadata": metadata, **row}))
    place = _chance.randrange(len(_scores))
    drawn = _scores[place]
    if len(_scores) > HELD_BACK:
        _scores[place] = _scores[-1]
        _scores.pop()
    return drawn


def train_from(seed: int, folder: Path, *, control: bool, rounds: int | None) -> Path:
    """Train the quickstart's model and return the folder of the last checkpoint."""
    overrides = {"run.seed": str(seed), "run.eval_every": "0", "run.checkpoint_every": "0"}
    if control:
        overrides["reward.function"] = f"{Path(__file__).resolve()}:shuffled"
    if rounds:
        overrides["run.rounds"] = str(rounds)
    train(load_config(QUICKSTART, overrides), folder)
    return max((folder / "checkpoints").iterdir())


def accuracy(model: Path, scratch: Path) -> float:
    """Held-out accuracy by the task's own reward."""
    result = scratch / "accuracy.json"
    evaluate_model(load_config(QUICKSTART, {"model.path": str(model)}), json_path=result)
    return float(json.loads(result.read_text())["accuracy"])


def num_parameters(model: Path) -> int:
    """Parameters of the model in a Hugging Face folder."""
    with safe_open(model / "model.safetensors", framework="numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="instead of the quickstart's own number")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = load_config(QUICKSTART)
    size = num_parameters(QUICKSTART.parent / "model") / 1e6
    threads = f"{config.engine.threads} + {config.trainer.threads} threads"
    print(f"model of {size:.2f}M parameters, float32, {config.engine.device}, {threads} (engine + trainer)")
    results: dict[str, list[dict[str, float]]] = {"reward": [], "control": []}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        first = accuracy(QUICKSTART.parent / "model", scratch)
        for seed in range(arguments.seeds):
            for name, control in (("reward", False), ("control", True)):
                run = scratch / f"{name}-{seed}"
                trained = train_from(seed, run, control=control, rounds=arguments.rounds)
                last = accuracy(trained, scratch)
                results[name].append({"seed": seed, "first": first, "last": last})
                print(f"{name:8} seed {seed}: {first:.3f} -> {last:.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
