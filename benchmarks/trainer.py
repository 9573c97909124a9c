"""Tokens per second of one optimizer step of tailrace's trainer.

    python benchmarks/trainer.py [--repeats 7] [--json FILE]

GRPO loss (sample mean), backward, clipping by the global norm, fused AdamW; float32, one CPU thread. The time
contains all of it, and the packing of the samples, and nothing else. The settings are the defaults; a unit is
a group. Reported are medians. Tokens are prompt and completion tokens without padding.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from common import run, save_model, write
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.types import SampleId

VOCABULARY, GROUP_SIZE = 64, 8
SHAPE = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
SMALL = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
MEDIUM = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8}
WORKLOADS = {
    "small": (SHAPE | SMALL | {"num_key_value_heads": 2, "head_dim": 24}, 8),
    "medium": (SHAPE | MEDIUM | {"num_key_value_heads": 4, "head_dim": 32}, 4),
}
"""The shape of a model, and the groups of a step."""


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


def measure(shape: dict[str, int], num_groups: int, repeats: int) -> dict[str, float]:
    """Time steps on the same samples. The first three are not counted."""
    samples = make_samples(num_groups)
    units = [samples[i : i + GROUP_SIZE] for i in range(0, len(samples), GROUP_SIZE)]
    lengths = [len(sample.completion_ids) for sample in samples]
    num_tokens = sum(len(sample.prompt_ids) for sample in samples) + sum(lengths)
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = save_model(Path(folder), **shape)
        settings = TrainerSettings(learning_rate=1e-6, max_grad_norm=1.0)
        algorithm = AlgorithmSettings(clip_low=0.2, clip_high=0.2)
        trainer = TorchTrainer(Path(folder), settings, algorithm, SamplingSettings(max_completion_tokens=512))
    times = []
    for _ in range(3 + repeats):
        started = time.perf_counter()
        trainer.accumulate(units)
        trainer.step()
        times.append(time.perf_counter() - started)
    return {
        "parameters": num_parameters,
        "tokens": num_tokens,
        "max_over_median_length": max(lengths) / statistics.median(lengths),
        "tailrace": num_tokens / statistics.median(times[3:]),
    }


def main(repeats: int = 7, json: Path | None = None) -> None:
    if os.environ.get("OMP_NUM_THREADS") != "1":  # it is read when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    results = {name: measure(*workload, repeats) for name, workload in WORKLOADS.items()}
    for name, found in results.items():
        print(
            f"{name}: {found['parameters'] / 1e6:.2f}M parameters, float32, CPU, 1 thread, "
            f"{found['tokens']:.0f} tokens, max/median length {found['max_over_median_length']:.1f}: "
            f"tailrace {found['tailrace']:.0f} tokens/s"
        )
    write(json, results)


if __name__ == "__main__":
    run(main)
