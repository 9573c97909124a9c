"""Tokens per second of one optimizer step of tailrace's trainer, and where its time goes.

    python benchmarks/trainer.py [--repeats 7] [--json FILE]
    python benchmarks/trainer.py --parts [--model FOLDER] [--dtype bfloat16] [--length 4096] [--json FILE]

GRPO loss (sample mean), backward, clipping by the global norm, fused AdamW; one CPU thread. The time contains
all of it, and the packing of the samples, and nothing else. The settings are the defaults, and a unit is a
group. Reported are medians, in seconds of the process's CPU time. Tokens are prompt and completion tokens
without padding.

`--parts` profiles one step and prints the share of each part: of a model folder, or of Qwen3-0.6B's shape
with a quarter of its width and of its vocabulary. `--length`: one response of so many tokens with activation
checkpointing, in place of groups of short ones.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import profile, record_function

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
REDUCED: dict[str, Any] = {
    "vocab_size": 37_984,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 28,
}
REDUCED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
REDUCED |= {"max_position_embeddings": 40_960}
OPTIMIZER = ("_fused_adamw_", "_foreach_norm", "_foreach_mul_", "linalg_vector_norm", "div_", "zero_")
HOST = "Python"


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


def trainer_of(folder: Path, **settings: Any) -> TorchTrainer:
    given = TrainerSettings(learning_rate=1e-6, max_grad_norm=1.0, **settings)
    algorithm = AlgorithmSettings(clip_low=0.2, clip_high=0.2)
    return TorchTrainer(folder, given, algorithm, SamplingSettings(max_completion_tokens=512))


def measure(shape: dict[str, Any], num_groups: int, repeats: int) -> dict[str, float]:
    """Time steps on the same samples. The first three are not counted."""
    samples = make_samples(num_groups)
    units = [samples[i : i + GROUP_SIZE] for i in range(0, len(samples), GROUP_SIZE)]
    lengths = [len(sample.completion_ids) for sample in samples]
    num_tokens = sum(len(sample.prompt_ids) for sample in samples) + sum(lengths)
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = save_model(Path(folder), **shape)
        trainer = trainer_of(Path(folder))
    times = []
    for _ in range(3 + repeats):
        started = time.process_time()
        trainer.accumulate(units)
        trainer.step()
        times.append(time.process_time() - started)
    return {
        "parameters": num_parameters,
        "tokens": num_tokens,
        "max_over_median_length": max(lengths) / statistics.median(lengths),
        "tailrace": num_tokens / statistics.median(times[3:]),
    }


def part(name: str, shapes: Iterable[Sequence[int]], vocabulary: int, weights: set[tuple[int, ...]]) -> str:
    """The part of a step that an operation of torch belongs to. `shapes`: of its tensors."""
    name, tensors = name.removeprefix("aten::"), {tuple(shape) for shape in shapes}
    of_weights = bool(tensors & weights)
    if "attention" in name:
        return "attention"
    if "embedding" in name:
        return "embedding"
    if name.startswith(("_fused", "_foreach")) or (name in OPTIMIZER and of_weights):
        return "optimizer"
    if name in ("mm", "addmm", "bmm"):
        return "logits" if any(vocabulary in each for each in tensors) else "linear layers"
    if of_weights and name == "copy_":
        return "casts of weights and their gradients"
    if of_weights and name == "add_":
        return "sums of gradients"
    if any(vocabulary in each for each in tensors):
        return "softmax over the vocabulary"
    return "norms, rotations, activations, residuals" if "::" not in name and name != HOST else HOST


def profiled(folder: Path, dtype: Literal["float32", "bfloat16"], length: int) -> dict[str, float]:
    """Profile the second of two steps. Returns the seconds of each part."""
    samples = make_samples(2)
    if length:
        first = samples[0]
        samples = [TrainingSample(first.id, first.prompt_ids, [1] * length, [-4.0] * length, 1.0)]
    limit = max(1024, length + 64)
    trainer = trainer_of(
        folder, dtype=dtype, max_tokens_per_microbatch=limit, activation_checkpointing=bool(length)
    )
    model = trainer._policy.model
    weights = {tuple(each.shape) for each in model.parameters() if each.ndim == 2}
    units = [samples[i : i + GROUP_SIZE] for i in range(0, len(samples), GROUP_SIZE)]

    def step() -> None:
        trainer.accumulate(units)
        trainer.step()

    step()
    with profile(record_shapes=True) as found, record_function(HOST):
        step()
    seconds: Counter[str] = Counter()
    for row in found.key_averages(group_by_input_shape=True):
        shapes = [each for each in row.input_shapes if each and isinstance(each[0], int)]
        of = part(row.key, shapes, model.config.vocab_size, weights)
        seconds[of] += row.self_cpu_time_total / 1e6
    return dict(seconds.most_common())


def main(
    repeats: int = 7,
    json: Path | None = None,
    parts: bool = False,
    model: Path | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    length: int = 0,
) -> None:
    if os.environ.get("OMP_NUM_THREADS") != "1":  # it is read when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    if parts:
        with tempfile.TemporaryDirectory() as scratch:
            if model is None:
                save_model(Path(scratch), **REDUCED)
            seconds = profiled(model or Path(scratch), dtype, length)
        total = sum(seconds.values())
        for name, each in seconds.items():
            print(f"{each / total:6.1%}  {each:7.3f} s  {name}")
        print(f"        {total:7.3f} s in all")
        write(json, seconds)
        return
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
