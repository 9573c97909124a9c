"""One GPU in ten minutes, without a network: what runs, how fast beside its limits, and how much memory.

    bash benchmarks/one_gpu.sh [--json FILE] [--only WORD] [--device cuda|cpu] [--tiny]

Each part is a process with a time limit; what it has measured by then is kept. The weights are random.

    memory   peak of CUDA's allocator in two steps of one full micro-batch, which --dry-run's choices make as
             large as a card of 24, 48 and 80 GiB allows, beside the estimate; all weights and an adapter
    update   a publication while 32 requests decode: seconds, pause, the pause in decode steps (weights.py)
    engine   64 and 256 requests, in graphs and without, beside transformers (gpu_rates.py). Of the physical
             limit vLLM reaches 29% at 256 requests by its published rates
    trainer  groups, 16,384 and 65,536 tokens (gpu_rates.py)
    peer     seconds of a GRPO step of TRL, and of `serial`, each by its own engine: same prompts and lengths
    checks   those of gpu_check.py that one card can run

--device cpu --tiny runs each part in little. Its figures say nothing.
"""

import json as jsons
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common import QWEN3, run, save_model, write

HERE = Path(__file__).parent
QWEN3_1B7 = QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144}
"""The shape of Qwen3-1.7B."""
CAPS = {24: QWEN3, 48: QWEN3_1B7, 80: QWEN3_1B7}
"""GiB of a card, and the model whose weights are all trained on it."""
GROUPS, GROUP_SIZE, STEPS, PEER_TOKENS = 8, 8, 3, 256
Device = Literal["cuda", "cpu"]
Figures = dict[str, Any]


class Part(NamedTuple):
    """A script, its words, and the seconds that it may take."""

    script: str
    words: tuple[str, ...]
    limit_s: int


ENGINE = "engine, 64 requests|engine, 256 requests"
TRAINER = "trainer, groups|trainer, 16k|trainer, 65k"
PARTS = {
    "memory": Part("one_gpu.py", ("--part", "memory"), 90),
    "update": Part("one_gpu.py", ("--part", "update"), 70),
    "engine": Part("gpu_rates.py", ("--only", ENGINE), 110),
    "trainer": Part("gpu_rates.py", ("--only", TRAINER), 100),
    "peer": Part("one_gpu.py", ("--part", "peer"), 110),
    "checks": Part("gpu_check.py", (), 120),
}
"""Together ten minutes. The checks come last: they fill what is left."""


def memory(device: Device, tiny: bool, json: Path | None) -> None:
    """Peaks under caps beside the estimate."""
    import torch

    from gpu_rates import TINY, Step, train
    from tailrace.config import PolicyConfig
    from tailrace.contracts.memory import GIB
    from tailrace.drivers.assembly.machine import Machine, fit, run_memory
    from tailrace.errors import ConfigError

    rows: list[Figures] = []
    for cap, shape in CAPS.items():
        for kind, lora in (("all weights", None), ("LoRA", {"rank": 16})):
            with tempfile.TemporaryDirectory() as scratch:
                folder, longest = Path(scratch), 64 if tiny else 4096
                num = save_model(folder, dtype="bfloat16", **TINY if tiny else shape)
                trainer = {"device": device, "dtype": "bfloat16", "lora": lora}
                config = PolicyConfig.model_validate(
                    {
                        "run": {"rounds": 1, "group_size": 2},
                        "schedule": {"name": "serial"},
                        "model": {"path": folder},
                        "data": {"kind": "rows", "path": "none.jsonl"},
                        "sampling": {"max_completion_tokens": longest},
                        "engine": {"dtype": "bfloat16"},
                        "trainer": trainer,
                    }
                )
                row: Figures = {"cap_gib": cap, "kind": kind, "parameters": num}
                machine = Machine(1, float("inf"), gpu_memory=cap * GIB, gpus=1)
                try:
                    config = fit(config, machine, prompt_tokens=64, overlaps=False).config
                    tokens = min(config.trainer.max_tokens_per_microbatch, 256 if tiny else 2**20)
                    settings = {"max_tokens_per_microbatch": tokens, "lora": lora}
                    estimate = next(each for each in run_memory(config, 64) if each.name == "trainer")
                    row |= {"tokens": tokens, "estimate_gib": sum(estimate.on_device.values()) / GIB}
                    if device == "cuda":
                        total = torch.cuda.get_device_properties(0).total_memory
                        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GIB / total))
                        torch.cuda.empty_cache()
                    step = Step("", max(1, tokens // longest), 1, 64, longest - 64 or 1, settings)
                    row["peak_gib"] = train(folder, step, device, 1)[1]
                except (ConfigError, torch.OutOfMemoryError) as error:
                    row["why_not"] = str(error).partition("\n")[0]
            rows.append(row)
            print(row, flush=True)
            write(json, rows)


def update(device: Device, tiny: bool, json: Path | None) -> None:
    """A publication in flight by each transport."""
    from dataclasses import asdict

    from gpu_rates import TINY
    from tailrace import clock
    from weights import measure

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_model(folder / "model", dtype="bfloat16", **TINY if tiny else QWEN3)
        measured = measure(folder / "model", folder, 1 if tiny else 3, None, device)
        found = {name: asdict(each) for name, each in clock.run(measured, virtual=False).items()}
    print(found)
    write(json, found)


def peer(device: Device, tiny: bool, json: Path | None) -> None:
    """Steps of TRL's GRPOTrainer, then those of `serial`. Without trl it is said, and `serial` runs alone."""
    from importlib.util import find_spec

    from gpu_check import SMALL, make_model
    from trl_peer import SUMS, figures, tailrace_steps

    length = 8 if tiny else PEER_TOKENS
    rows = [{"prompt": f"{n} + {n + 1} = ", "answer": f"{2 * n + 1}"} for n in range(GROUPS * STEPS)]
    found: Figures = {} if find_spec("trl") else {"why_no_trl": "trl is not installed"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = str(make_model(folder / "model", SMALL if tiny else QWEN3))
        (folder / "model" / "generation_config.json").unlink()  # without the end of text lengths are equal
        (folder / "rows.jsonl").write_text("".join(jsons.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if not found:
            given = {"min_new_tokens": length}
            others = {"generation_kwargs": given, "use_cpu": device == "cpu"}
            spec = {"model": model, "folder": str(folder / "trl"), "rows": rows, "steps": STEPS, "seed": 0}
            spec |= {"groups": GROUPS, "group_size": GROUP_SIZE, "learning_rate": 1e-6, "reward": "near"}
            settings = {"dtype": "autocast", "batch": GROUPS * GROUP_SIZE, "others": others}
            spec |= {"threads": 1, "max_tokens": length, "settings": settings}
            (folder / "spec.json").write_text(jsons.dumps(spec), encoding="utf-8")
            words = [str(HERE / "trl_grpo.py"), "train", str(folder / "spec.json"), str(folder / "trl.json")]
            subprocess.run([sys.executable, "-P", *words], check=True)
            found["trl"] = figures(jsons.loads((folder / "trl.json").read_text(encoding="utf-8"))["steps"])
            write(json, found)
        keys: Figures = {"model.path": model, "data.path": folder / "rows.jsonl", "run.rounds": STEPS}
        keys |= {"sampling.max_completion_tokens": length}
        keys |= {"run.group_size": GROUP_SIZE, "trainer.learning_rate": 1e-6, "run.eval_every": 0}
        keys |= {"schedule.groups_per_round": GROUPS, "schedule.groups_per_step": GROUPS}
        keys |= {f"{side}.device": device for side in ("engine", "trainer")}
        keys |= {f"{side}.dtype": "bfloat16" for side in ("engine", "trainer")}
        words = ["train", str(SUMS / "first_run.toml"), "--output-dir", str(folder / "run")]
        words += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        subprocess.run([sys.executable, "-m", "tailrace.cli", *words], check=True)
        found["serial"] = figures(tailrace_steps(folder / "run"))
    print({side: each["step_s"] for side, each in found.items() if side in ("trl", "serial")}, flush=True)
    write(json, found)


def measure_all(device: Device, tiny: bool, json: Path | None, only: str) -> None:
    """Run each part, and write all results after it."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    results: Figures = {"card": name, "torch": torch.__version__, "tiny": tiny, "parts": {}}
    environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    with tempfile.TemporaryDirectory() as scratch:
        for part, (script, words, limit_s) in PARTS.items():
            if only not in part:
                continue
            file, start_s = Path(scratch, f"{part}.json"), time.perf_counter()
            command = [sys.executable, str(HERE / script), *words, "--json", str(file)]
            if script == "one_gpu.py":
                command += ["--device", device, *["--tiny"] * tiny]
            elif tiny:
                little = {"gpu_rates.py": ["--shape", "tiny", "--repeats", "1"]}
                command += little.get(script, ["--only", "micro-batches"])
            print(f"== {part}, at most {limit_s} s", flush=True)
            try:
                ended = str(
                    subprocess.run(command, timeout=limit_s * (20 if tiny else 1), env=environment).returncode
                )
            except subprocess.TimeoutExpired:
                ended = "stopped at its time limit"
            found = jsons.loads(file.read_text(encoding="utf-8")) if file.exists() else None
            seconds = round(time.perf_counter() - start_s, 1)
            results["parts"][part] = {"exit": ended, "seconds": seconds, "results": found}
            write(json, results)
    if any(each["exit"] != "0" for each in results["parts"].values()):
        sys.exit(1)


def main(
    device: Device = "cuda",
    tiny: bool = False,
    json: Path | None = None,
    only: str = "",
    part: Literal["all", "memory", "update", "peer"] = "all",
) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark needs a CUDA device; with --device cpu --tiny each part runs in little"
        )
    if device == "cpu" and not tiny:
        raise SystemExit("--device cpu needs --tiny")
    if part == "all":
        measure_all(device, tiny, json, only)
    else:
        {"memory": memory, "update": update, "peer": peer}[part](device, tiny, json)


if __name__ == "__main__":
    run(main)
