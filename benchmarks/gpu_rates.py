"""Rates of one GPU at the shape of Qwen3-0.6B with random weights, in bfloat16.

    python benchmarks/gpu_rates.py [--repeats 3] [--json FILE]

    trainer   tokens a second of an optimizer step (GRPO, fused AdamW, all parameters), for groups of 8 short
              responses, for one response of 16,384 tokens, and for one of 65,536 with activation
              checkpointing. prime-rl publishes 11,896 and 10,147 tokens a second of its RL trainer for the
              last two on one H100 (benchmarks/baselines in its repository).
    engine    completion tokens a second of the embedded engine and of transformers' `generate`, 64 and 256
              requests of 64 prompt tokens and 256 completion tokens, which arrive together

Figures are medians after one unmeasured turn. The two engines take turns.
"""

import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import QWEN3, run, save_model, write
from engine_peers import Generate, Requests, native
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.types import SampleId

PROMPT, COMPLETION = 64, 256
"""Tokens of the engine's requests."""
STEPS: dict[str, tuple[int, int, int, dict[str, object]]] = {
    "groups": (16, 8, 512, {}),
    "16k": (1, 1, 16_384 - PROMPT, {}),
    "65k": (1, 1, 65_536 - PROMPT, {"activation_checkpointing": True}),
}
"""Groups, samples of a group, completion tokens of a sample, settings of the trainer."""


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def ids(number: int) -> list[int]:
    return [random.randrange(1000) for _ in range(number)]


def trainer_of(folder: Path, length: int, **settings: object) -> TorchTrainer:
    given = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_tokens_per_microbatch": max(length, 16_384),
        **settings,
    }
    sampling = SamplingSettings(max_completion_tokens=length)
    return TorchTrainer(folder, TrainerSettings.model_validate(given), AlgorithmSettings(), sampling)


def train(folder: Path, name: str, repeats: int) -> dict[str, float]:
    """Optimizer steps over the samples of STEPS[name]. The tokens of a prompt count once a group."""
    num_groups, size, length, settings = STEPS[name]
    units = []
    for group in range(num_groups):
        prompt = ids(PROMPT)
        completions = [ids(length) for _ in range(size)]
        units.append(
            [
                TrainingSample(
                    SampleId(group, 0, index), prompt, completion, [-7.0] * length, 1.0 - 2 * (index % 2)
                )
                for index, completion in enumerate(completions)
            ]
        )
    trainer = trainer_of(folder, length + PROMPT, **settings)

    def step() -> None:
        trainer.accumulate(units)
        trainer.step()

    step()
    torch.cuda.reset_peak_memory_stats()
    tokens = num_groups * (PROMPT + size * length)
    took = median(seconds(step) for _ in range(repeats))
    return {"tokens_s": tokens / took, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def transformers(folder: Path) -> Generate:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    sampling = {"do_sample": True, "top_k": 0, "pad_token_id": 0}

    def generate(requests: Requests) -> int:
        """Requests of one length and one number of tokens."""
        given, length = torch.tensor([prompt for prompt, _ in requests], device="cuda"), requests[0][1]
        lengths = {"max_new_tokens": length, "min_new_tokens": length}
        with torch.inference_mode():
            out = model.generate(given, attention_mask=torch.ones_like(given), **sampling, **lengths)
        return int(out[:, given.shape[1] :].numel())

    return generate


def generation(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    own = native(str(folder), "bfloat16", device="cuda", kv_cache_tokens=131_072)
    engines = {"native": own, "transformers": transformers(folder)}
    found: dict[str, dict[str, float]] = {}
    for number in (64, 256):
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(1 + repeats):
            for name, generate in engines.items():
                took = seconds(partial(generate, [(ids(PROMPT), COMPLETION) for _ in range(number)]))
                rates[name] += [number * COMPLETION / took] if turn else []
        found[str(number)] = {name: median(measured) for name, measured in rates.items()}
    return found


def main(repeats: int = 3, json: Path | None = None) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    random.seed(0)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}")
    results: dict[str, Any] = {"device": name, "trainer": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        print(f"{save_model(folder, dtype='bfloat16', **QWEN3):,} parameters, bfloat16")
        results["engine"] = generation(folder, repeats)
        print("engine", results["engine"], flush=True)
        for step in STEPS:
            results["trainer"][step] = train(folder, step, repeats)
            print("trainer", step, results["trainer"][step], flush=True)
            torch.cuda.empty_cache()
    write(json, results)


if __name__ == "__main__":
    run(main)
