"""What LoRA adapters cost the embedded engine in a decode step.

    python benchmarks/adapters.py --model FOLDER [--dtype bfloat16|float32] [--sequences N] [--threads N]
                                  [--steps N] [--json F]

Three engines take turns, a decode step each: with the model alone, as with publish = "merged" in
[trainer.lora]; with one adapter; and with two, each for half of the sequences. The figures are medians.
"""

import time
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from common import run, write
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.types import SamplingParams

RANK, SCALE = 16, 2.0
PROMPT = list(range(5, 70))


def engine_of(model: Path, dtype: str, num_versions: int) -> NativeEngine:
    """With places for so many adapters; 0: it gets whole weights."""
    settings = NativeEngineSettings.model_validate({"dtype": dtype})
    sampling, scale = SamplingSettings(max_completion_tokens=1000), SCALE if num_versions else None
    return NativeEngine(model, settings, sampling, adapter_scale=scale, num_versions=max(1, num_versions))


def adapter(engine: NativeEngine, seed: int) -> dict[str, Tensor]:
    """Random factors of all linear layers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in engine.weights().items():
        if name.endswith("_proj.weight"):
            layer, (num_out, num_in) = name.removesuffix(".weight"), weight.shape
            tensors[f"{layer}.lora_A.weight"] = 0.04 * torch.randn(RANK, num_in, generator=generator)
            tensors[f"{layer}.lora_B.weight"] = 1e-3 * torch.randn(num_out, RANK, generator=generator)
    return tensors


def decode_steps(model: Path, dtype: str, sequences: int, steps: int) -> dict[str, float]:
    """Median seconds of a decode step by the number of adapters."""
    engines = {num: engine_of(model, dtype, num) for num in (0, 1, 2)}
    endless = SamplingParams(1000, ignore_end_of_text=True)
    for num, engine in engines.items():
        for version in range(1, num + 1):
            engine.load(adapter(engine, version), version=version, kv="keep")
        for number in range(sequences):
            pin = 1 + number % num if num else None
            engine.submit(GenerationRequest(f"{number}", PROMPT, (), number, sampling=endless, pin=pin))
        for _ in range(3):
            engine.step()
    seconds: dict[int, list[float]] = {num: [] for num in engines}
    for _ in range(steps):
        for num, engine in engines.items():
            start_s = time.perf_counter()
            engine.step()
            seconds[num].append(time.perf_counter() - start_s)
    return {f"{num} adapters": median(each) for num, each in seconds.items()}


def main(
    *,
    model: Path,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    sequences: int = 8,
    threads: int = 1,
    steps: int = 60,
    json: Path | None = None,
) -> None:
    torch.set_num_threads(threads)
    taken = decode_steps(model, dtype, sequences, steps)
    print(f"{model.name}, {dtype}, {sequences} sequences, {threads} threads")
    for name, seconds in taken.items():
        print(f"  {name}   {1e3 * seconds:7.1f} ms a decode step   {seconds / taken['0 adapters']:.2f}x")
    write(json, {"decode_s": taken})


if __name__ == "__main__":
    run(main)
