"""Tokens per second of one optimizer step: tailrace's trainer against TRL's GRPOTrainer on the same batch.

    python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    python benchmarks/trainer.py --trl-python trl/bin/python --json trainer.json

Both start from the same weights and do the same step: GRPO loss (sample mean), backward, clipping by the
global norm, fused AdamW; float32, one CPU thread. The time contains all of it and nothing else: for tailrace
from the samples as lists (packing included), for TRL from tensors that are already padded. TRL runs its own
code (`compute_loss`, its accelerator, its optimizer) without activation checkpointing, which is its default,
and with the fastest of several batch sizes; its batch is padded as TRL pads, to the longest prompt and the
longest completion. tailrace has its default settings; a unit is a group.

Each runs in its own process, and they take turns, so that other load on the machine affects both alike.
Reported are medians. Tokens are prompt and completion tokens without padding.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tailrace.algo.base import AlgorithmSettings
from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.batch import TrainingSample
from tailrace.trainer.trainer import TorchTrainer
from tailrace.types import SampleId

VOCABULARY = 64
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 1e-6, 0.2, 1.0
GROUP_SIZE = 8
TRL_BATCH_SIZES = (4, 8, 16, 32)


@dataclass(frozen=True)
class Workload:
    """A model and how many groups a step has."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    num_groups: int


WORKLOADS = (
    Workload("small", hidden=96, intermediate=256, layers=4, heads=4, num_groups=8),
    Workload("medium", hidden=256, intermediate=704, layers=6, heads=8, num_groups=4),
)


@dataclass(frozen=True)
class Timing:
    seconds: float
    loss: float


def make_samples(num_groups: int) -> list[TrainingSample]:
    """Samples of long-tailed lengths: lognormal, median 32, sigma 1.2, clipped to 4..320 tokens."""
    chance = random.Random(0)
    samples = []
    for prompt in range(num_groups):
        prompt_ids = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(12, 25))]
        for number in range(GROUP_SIZE):
            length = max(4, min(320, round(32 * chance.lognormvariate(0, 1.2))))
            samples.append(
                TrainingSample(
                    id=SampleId(prompt, 0, number),
                    prompt_ids=prompt_ids,
                    completion_ids=[chance.randrange(VOCABULARY) for _ in range(length)],
                    behavior_logprobs=[chance.uniform(-4.4, -3.9) for _ in range(length)],
                    advantage=chance.gauss(0, 1),
                )
            )
    return samples


def save_model(workload: Workload, folder: Path) -> int:
    """Write a random model; returns its number of parameters."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=workload.hidden,
            intermediate_size=workload.intermediate,
            num_hidden_layers=workload.layers,
            num_attention_heads=workload.heads,
            num_key_value_heads=workload.heads // 2,
            head_dim=workload.hidden // workload.heads,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    return int(model.num_parameters())


class Ours:
    """tailrace's trainer, in this process."""

    def __init__(self, model: Path, samples: Sequence[TrainingSample]) -> None:
        torch.set_num_threads(1)
        settings = TrainerSettings(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
        algorithm = AlgorithmSettings(clip_low=CLIP, clip_high=CLIP)
        self._trainer = TorchTrainer.load(
            model, settings, algorithm, temperature=1.0, max_completion_tokens=512
        )
        self._units = [samples[i : i + GROUP_SIZE] for i in range(0, len(samples), GROUP_SIZE)]

    def step(self) -> Timing:
        started = time.perf_counter()
        self._trainer.accumulate(self._units)
        stats = self._trainer.step()
        return Timing(time.perf_counter() - started, stats.loss)


class Trl:
    """TRL's trainer, in a process of its own environment."""

    def __init__(self, python: Path, model: Path, samples: Sequence[TrainingSample], folder: Path) -> None:
        batch = folder / "batch.json"
        batch.write_text(
            json.dumps(
                {
                    "model": str(model),
                    "learning_rate": LEARNING_RATE,
                    "clip": CLIP,
                    "max_grad_norm": MAX_GRAD_NORM,
                    "group_size": GROUP_SIZE,
                    "vocabulary": VOCABULARY,
                    "prompt_ids": [sample.prompt_ids for sample in samples],
                    "completion_ids": [sample.completion_ids for sample in samples],
                    "logprobs": [sample.behavior_logprobs for sample in samples],
                    "advantages": [sample.advantage for sample in samples],
                }
            )
        )
        driver = Path(__file__).with_name("trainer_trl.py")
        self._process = subprocess.Popen(
            [python, driver, batch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def step(self, batch_size: int) -> Timing:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(batch_size, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the TRL process ended (exit code {self._process.wait()}); is trl installed?")
        return Timing(**json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def race(workload: Workload, trl_python: Path, repeats: int) -> dict[str, float]:
    """Time both on one workload, in turns."""
    samples = make_samples(workload.num_groups)
    lengths = [len(sample.completion_ids) for sample in samples]
    num_tokens = sum(len(sample.prompt_ids) for sample in samples) + sum(lengths)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_parameters = save_model(workload, folder / "model")
        ours = Ours(folder / "model", samples)
        trl = Trl(trl_python, folder / "model", samples, folder)
        first, reference = ours.step(), trl.step(GROUP_SIZE)
        if abs(first.loss - reference.loss) > 1e-4:
            raise SystemExit(f"not the same step: our loss {first.loss}, TRL's {reference.loss}")
        tried = {size: min(trl.step(size).seconds for _ in range(2)) for size in TRL_BATCH_SIZES}
        batch_size = min(tried, key=tried.__getitem__)
        pairs = [(ours.step().seconds, trl.step(batch_size).seconds) for _ in range(repeats)]
        trl.close()
    ours_s, trl_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "parameters": num_parameters,
        "tokens": num_tokens,
        "max_over_median_length": max(lengths) / statistics.median(lengths),
        "tailrace": num_tokens / ours_s,
        "trl": num_tokens / trl_s,
        "trl_batch_size": batch_size,
        "ratio": statistics.median(theirs / mine for mine, theirs in pairs),
        "ratio_min": min(theirs / mine for mine, theirs in pairs),
        "ratio_max": max(theirs / mine for mine, theirs in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a second of an optimizer step, ours and TRL's.")
    parser.add_argument("--trl-python", type=Path, default=Path(sys.executable), metavar="PATH")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="F")
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # it is read when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
    results = {}
    for workload in WORKLOADS:
        result = race(workload, arguments.trl_python, arguments.repeats)
        results[workload.name] = result
        print(
            f"{workload.name}: {result['parameters'] / 1e6:.2f}M parameters, float32, CPU, 1 thread each, "
            f"{result['tokens']:.0f} tokens, max/median length {result['max_over_median_length']:.1f}: "
            f"tailrace {result['tailrace']:.0f} tokens/s, TRL {result['trl']:.0f} "
            f"(batch {result['trl_batch_size']:.0f}), "
            f"ratio {result['ratio']:.2f} [{result['ratio_min']:.2f}, {result['ratio_max']:.2f}]"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
