"""Rates of one GPU in bfloat16 with random weights, beside its physical limit and what others publish.

    python benchmarks/gpu_rates.py [--only WORD] [--repeats 3] [--json FILE]
    python benchmarks/gpu_rates.py --shape tiny             # each row in little, also on a CPU

    trainer   tokens a second of an optimizer step (GRPO, fused AdamW): groups of 8 short responses, one
              response of 16,384 tokens and one of 65,536 with activation checkpointing, of all weights of
              Qwen3-0.6B's shape and of an adapter of Qwen3-4B's (prime-rl's lengths); 8 responses of 256
              tokens with Qwen2.5-1.5B's sizes (TRL's defaults)
    engine    completion tokens a second of the embedded engine for requests that arrive together: 64 and 256
              of 64 prompt and 256 completion tokens, in turn with transformers' `generate` and on a GPU with
              the engine without CUDA graphs; 500 of 512 and 128; the 256 requests of nano-vllm's script

--only WORD|WORD: rows with one of the words in their names.

The share is the rate over the limit (limits.py). Figures are medians after one unmeasured turn.
"""

import random
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from common import QWEN3, run, save_model, write
from engine_peers import Generate, Requests, native
from limits import card, generation_s, seconds, training_s
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.memory import ModelShape
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.types import SampleId

QWEN3_4B = QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
QWEN3_4B |= {"num_attention_heads": 32}
QWEN2_1B5 = QWEN3 | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12}
QWEN2_1B5 |= {"num_key_value_heads": 2}
TINY = QWEN3 | {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPES = {"0.6B": QWEN3, "1.5B": QWEN2_1B5, "4B": QWEN3_4B}
SHORTER, FEWER = 32, 32
"""By what lengths and numbers are divided with the tiny shape."""


class Step(NamedTuple):
    """An optimizer step of groups of samples."""

    shape: str
    groups: int
    size: int
    prompt: int
    completion: int
    settings: dict[str, Any] = {}
    published: str = ""


RECOMPUTED = {"activation_checkpointing": True}
LORA = RECOMPUTED | {"lora": {"rank": 16, "alpha": 32.0}}
STEPS = {
    "groups": Step("0.6B", 16, 8, 64, 512),
    "16k": Step("0.6B", 1, 1, 64, 16_320, {}, "prime-rl, H100: 11,896"),
    "65k": Step("0.6B", 1, 1, 64, 65_472, RECOMPUTED, "prime-rl, H100: 10,147"),
    "1.5B": Step("1.5B", 1, 8, 64, 256, {}, "TRL 1.11, H100: 0.62 s a step of a length that is not named"),
    "4B, adapter, 16k": Step("4B", 1, 1, 64, 16_320, LORA, "prime-rl, H100: 6,230"),
    "4B, adapter, 65k": Step("4B", 1, 1, 64, 65_472, LORA, "prime-rl, H100: 4,160"),
}
Lengths = list[tuple[int, int]]
"""Prompt and completion tokens of each request."""


def nano_vllm() -> Lengths:
    """The lengths that its bench.py draws: 256 requests of 133,966 completion tokens."""
    draw = random.Random(0).randint
    prompts = [len([draw(0, 10_000) for _ in range(draw(100, 1024))]) for _ in range(256)]
    return [(prompt, draw(100, 1024)) for prompt in prompts]


REQUESTS: dict[str, tuple[Lengths, str]] = {
    "64 requests": ([(64, 256)] * 64, ""),
    "256 requests": ([(64, 256)] * 256, ""),
    "512 in, 128 out": ([(512, 128)] * 500, "vLLM 0.19, H100: 12,147"),
    "nano-vllm's script": (nano_vllm(), "nano-vllm, RTX 4070: 1,434; vLLM: 1,362"),
}
BESIDE = ("64 requests", "256 requests")
"""Requests of one length, which transformers serves, too."""


def ids(number: int) -> list[int]:
    return [random.randrange(200) for _ in range(number)]


def trainer_of(folder: Path, length: int, **settings: object) -> TorchTrainer:
    given = {"dtype": "bfloat16", "max_tokens_per_microbatch": max(length, 16_384), **settings}
    sampling = SamplingSettings(max_completion_tokens=length)
    return TorchTrainer(folder, TrainerSettings.model_validate(given), AlgorithmSettings(), sampling)


def train(folder: Path, row: Step, device: str, repeats: int) -> tuple[float, float]:
    """The median seconds of a step, and the peak of the GPU's memory in GiB."""
    units = []
    for group in range(row.groups):
        prompt = ids(row.prompt)
        completions = [ids(row.completion) for _ in range(row.size)]
        units.append(
            [
                TrainingSample(
                    SampleId(group, 0, index), prompt, each, [-7.0] * len(each), 1.0 - 2 * (index % 2)
                )
                for index, each in enumerate(completions)
            ]
        )
    trainer = trainer_of(folder, row.completion + row.prompt, device=device, **row.settings)

    def step() -> None:
        trainer.accumulate(units)
        trainer.step()

    step()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    took = median(seconds(step, device) for _ in range(repeats))
    return took, torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0.0


def transformers(folder: Path, device: str) -> Generate:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    sampling = {"do_sample": True, "top_k": 0, "pad_token_id": 0}

    def generate(requests: Requests) -> int:
        """Requests of one length and one number of tokens."""
        given, length = torch.tensor([prompt for prompt, _ in requests], device=device), requests[0][1]
        lengths = {"max_new_tokens": length, "min_new_tokens": length}
        with torch.inference_mode():
            out = model.generate(given, attention_mask=torch.ones_like(given), **sampling, **lengths)
        return int(out[:, given.shape[1] :].numel())

    return generate


def generate(engines: dict[str, Generate], lengths: Lengths, device: str, repeats: int) -> dict[str, float]:
    """The median seconds of each engine, which take turns."""
    took: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(1 + repeats):
        for name, engine in engines.items():
            requests = [(ids(prompt), completion) for prompt, completion in lengths]
            measured = seconds(partial(engine, requests), device)
            took[name] += [measured] if turn else []
    return {name: median(each) for name, each in took.items()}


def main(
    only: str = "",
    repeats: int = 3,
    json: Path | None = None,
    shape: Literal["published", "tiny"] = "published",
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and shape == "published":
        raise SystemExit("this benchmark needs a CUDA device; with --shape tiny it runs on a CPU")
    random.seed(0)
    own, is_tiny = card(device), shape == "tiny"
    print(f"{own.name}: {own.bandwidth / 1e12:.3g} TB/s, {own.arithmetic / 1e12:.3g} TFLOP/s in bfloat16")
    print(f"{'':30}{'tokens/s':>10}{'limit':>10}{'share':>7}")
    results: dict[str, Any] = {"card": own._asdict(), "torch": torch.__version__, "rows": {}}

    def show(name: str, tokens: int, took: float, least: float, published: str, **more: float) -> None:
        row = {"tokens_s": tokens / took, "limit_tokens_s": tokens / least, "share": least / took, **more}
        results["rows"][name] = row | {"published": published}
        write(json, results)
        figures = f"{tokens / took:>10,.0f}{tokens / least:>10,.0f}{least / took:>7.1%}"
        others = "".join(f"  {key} {value:.3g}" for key, value in more.items())
        print(f"{name:30}{figures}{others}  {published}", flush=True)
        if device != "cpu":
            torch.cuda.empty_cache()

    def is_chosen(name: str) -> bool:
        return any(word in name for word in only.split("|"))

    def little(number: int, by: int) -> int:
        return max(2, number // by) if is_tiny and number > 1 else number

    for kind, sizes in SHAPES.items():
        steps = {
            name: row for name, row in STEPS.items() if row.shape == kind and is_chosen(f"trainer, {name}")
        }
        served = {
            name: row for name, row in REQUESTS.items() if is_chosen(f"engine, {name}") and kind == "0.6B"
        }
        if not steps and not served:
            continue
        sizes = TINY if is_tiny else sizes
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            save_model(folder, dtype="bfloat16", **sizes)
            model = ModelShape.read(folder)
            for name, (lengths, published) in served.items():
                lengths = [(little(a, SHORTER), little(b, SHORTER)) for a, b in lengths]
                lengths = lengths[: little(len(lengths), FEWER)]
                room = max(4096, sum(map(sum, lengths)))
                settings: dict[str, Any] = {"device": device, "kv_cache_tokens": room}
                engines = {"native": native(str(folder), "bfloat16", **settings)}
                if name in BESIDE and device != "cpu":
                    engines["native without graphs"] = native(
                        str(folder), "bfloat16", graphs=False, **settings
                    )
                if name in BESIDE:
                    engines["transformers"] = transformers(folder, device)
                took = generate(engines, lengths, device, repeats)
                tokens, least = sum(length for _, length in lengths), generation_s(model, own, lengths)
                for engine, each in took.items():
                    show(f"{engine}, {name}", tokens, each, least, published)
                del engines
            for name, row in steps.items():
                row = row._replace(
                    groups=little(row.groups, FEWER),
                    prompt=little(row.prompt, SHORTER),
                    completion=little(row.completion, SHORTER),
                )
                took_s, peak = train(folder, row, device, repeats)
                groups = [(row.prompt, [row.completion] * row.size)] * row.groups
                tokens = row.groups * (row.prompt + row.size * row.completion)
                least = training_s(model, own, groups, "lora" in row.settings)
                show(f"trainer, {name}", tokens, took_s, least, row.published, step_s=took_s, peak_gib=peak)
    if not results["rows"]:
        raise SystemExit(f"no row has {only!r} in its name")


if __name__ == "__main__":
    run(main)
