"""The check list for a machine with a GPU: every part of a run on it, or what was skipped and why.

    make gpu-check        python benchmarks/gpu_check.py [--list] [--only WORD] [--json FILE]

Each check is a short live run on the quickstart's model and task, in bfloat16: every schedule on the embedded
engine, every schedule on vLLM (the interpreter $VLLM_PYTHON), LoRA, activation checkpointing, CPU offload,
engine and trainer colocated on one GPU, weights by NCCL, and a trainer sharded over two GPUs. A check passes
if the run ends, each of its steps has a finite gradient, and the log-probs of engine and trainer differ by
less than MAX_MISMATCH_KL.

The exit code is 1 if a check failed. Without a GPU it is 0, and the list says what was skipped.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.api import train
from tailrace.config import load_config
from tailrace.errors import TailraceError
from tailrace.record.metrics import read_rows
from tailrace.record.rows import StepRow

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart" / "quickstart.toml"
ROUNDS = 3
MAX_MISMATCH_KL = 0.02
"""In nats a token, between engine and trainer with the same bfloat16 weights."""
SCHEDULES = {
    "serial": "groups_per_round = 32, groups_per_step = 16",
    "conventional": "steps_per_round = 2, groups_per_step = 16",
    "rolloutpipe": "groups_per_round = 32, groups_per_step = 16",
    "rolloutpipe_eager": "groups_per_round = 32, groups_per_step = 16",
    "april": "groups_per_round = 16, groups_launched = 24",
    "tailbatch": "groups_per_round = 16",
    "tailbatch_dapo": "groups_per_round = 16, requests_per_engine = 128",
    "tailbatch_async": "groups_per_round = 16",
    "rollpacker": "groups_per_round = 16",
    "pipelinerl": "groups_per_step = 16, in_flight_per_engine = 128, ring_groups = 32",
    "one_step_off": "groups_per_round = 32, groups_per_step = 16",
    "streamrl": "groups_per_round = 16",
    "streamrl_async": "groups_per_round = 16",
    "periodic_asynchrony": "groups_per_round = 16",
    "seer": "groups_per_round = 32, groups_per_step = 16",
    "sortedrl": "groups_per_round = 32, groups_per_step = 16",
    "sortedrl_on_policy": "groups_per_round = 32, groups_per_step = 16",
    "windowed_fifo": "groups_per_step = 16, groups_in_flight = 40, window = 12",
    "tailrace": "groups_per_step = 16, groups_in_flight = 32, staleness = 2",
    "tailrace_on_policy": "groups_per_round = 16",
}
NATIVE = '{ device = "cuda", dtype = "bfloat16", max_num_seqs = 256 }'
VLLM = '{ kind = "vllm", dtype = "bfloat16", max_num_seqs = 256, args = ["--gpu-memory-utilization", "0.3"] }'
SLEEPING_VLLM = VLLM.replace('"0.3"]', '"0.3", "--enable-sleep-mode"]')
"""Gives its memory back when it sleeps."""

JUDGES = (
    f'[{{ kind = "local", path = "{EXAMPLE.parent / "model"}", template = "{{completion}}", '
    'labels = ["1", "2"], device = "cuda", dtype = "bfloat16", memory_mib = 2, max_tokens = 400 }]'
)
"""The model that is trained judges, with less memory than its layers need."""


@dataclass(frozen=True, slots=True)
class Check:
    """One live run.

    Args:
        overrides: of the quickstart's config.
        num_gpus: CUDA devices that it needs.
    """

    name: str
    overrides: Mapping[str, str]
    num_gpus: int = 1
    needs_vllm: bool = False

    def skipped(self, num_gpus: int, vllm: str | None) -> str | None:
        """Why it cannot run here; None: it can."""
        if num_gpus < self.num_gpus:
            return f"needs {self.num_gpus} CUDA device{'s' * (self.num_gpus > 1)}, found {num_gpus}"
        if self.needs_vllm and not vllm:
            return "needs vLLM: set $VLLM_PYTHON to the interpreter of its environment"
        return None


def checks() -> list[Check]:
    """The whole list."""
    found = []
    for schedule, parameters in SCHEDULES.items():
        chosen = {"schedule": f'{{ name = "{schedule}", {parameters} }}'}
        found.append(Check(f"{schedule}, embedded engine", _overrides(chosen, NATIVE)))
        found.append(Check(f"{schedule}, vLLM", _overrides(chosen, VLLM), needs_vllm=True))
    together = '{ kind = "colocated", devices = "gpus", engines = [[0]], trainer = [[0]] }'
    apart = '{ devices = "gpus", engines = [[0]], trainer = [[1]] }'
    sharded = '{ devices = "gpus", engines = [[0]], trainer = [[0, 1]] }'
    serial = {"schedule": f'{{ name = "serial", {SCHEDULES["serial"]} }}'}
    nccl = {"weights": '{ transport = "process_group", backend = "nccl" }', "placement": apart}
    parts = {
        "LoRA, adapter alone": ({"trainer.lora": '{ rank = 16, publish = "adapter" }'}, 1),
        "colocated": ({"placement": together}, 1),
        "weights by NCCL": (nccl, 2),
        "trainer of two ranks, NCCL": ({"trainer.ranks": "2", "placement": sharded}, 2),
        "activation checkpointing": ({"trainer.activation_checkpointing": "true"}, 1),
        "judge with streamed layers": ({"reward.judges": JUDGES}, 1),
        "CPU offload": ({"trainer.cpu_offload": "true"}, 1),
    }
    for name, (overrides, num_gpus) in parts.items():
        found.append(Check(f"{name}, embedded engine", _overrides(serial | overrides, NATIVE), num_gpus))
    colocated = serial | parts["colocated"][0]
    found.append(Check("colocated, vLLM", _overrides(colocated, SLEEPING_VLLM), needs_vllm=True))
    return found


def _overrides(chosen: Mapping[str, str], engine: str) -> dict[str, str]:
    run = {"run.rounds": str(ROUNDS), "run.eval_every": "0", "run.checkpoint_every": "0"}
    trainer = {"trainer.dtype": "bfloat16", "trainer.device": "cuda"}
    return {**run, **trainer, "engine": engine, **chosen}


@dataclass(slots=True)
class Results:
    """Names of checks, by what became of them."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def run_check(check: Check, folder: Path) -> str | None:
    """Run it; returns what is wrong, or None."""
    try:
        train(load_config(EXAMPLE, check.overrides), folder)
    except TailraceError as error:
        return str(error)
    steps = [row for row in read_rows(folder / "metrics.jsonl") if isinstance(row, StepRow)]
    if not steps:
        return "no optimizer step"
    if any(row.skipped for row in steps):
        return "a gradient was not finite"
    mismatch = max((row.engine_mismatch_kl or 0.0 for row in steps), default=0.0)
    if mismatch > MAX_MISMATCH_KL:
        return f"the log-probs of engine and trainer differ: KL {mismatch:.4f} > {MAX_MISMATCH_KL}"
    return None


def run_all(chosen: Sequence[Check], num_gpus: int, vllm: str | None) -> Results:
    """Run what can run here, and print a line for each."""
    results = Results()
    for check in chosen:
        if why := check.skipped(num_gpus, vllm):
            results.skipped[check.name] = why
            print(f"skipped  {check.name}: {why}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            if why := run_check(check, Path(folder) / "run"):
                results.failed[check.name] = why
            else:
                results.passed.append(check.name)
        print(f"FAILED   {check.name}: {why}" if why else f"passed   {check.name}", flush=True)
    print(f"{len(results.passed)} passed, {len(results.failed)} failed, {len(results.skipped)} skipped")
    return results


def count_gpus() -> int:
    """CUDA devices that torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    parser.add_argument("--only", default="", metavar="WORD", help="checks whose name has the word")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    chosen = [check for check in checks() if arguments.only in check.name]
    if not chosen:
        parser.error(f"no check has {arguments.only!r} in its name; --list prints the names")
    if arguments.list:
        print("\n".join(check.name for check in chosen))
        return 0
    results = run_all(chosen, count_gpus(), os.environ.get("VLLM_PYTHON"))
    if arguments.json:
        fields = {name: getattr(results, name) for name in Results.__slots__}
        arguments.json.write_text(json.dumps(fields, indent=2))
    return 1 if results.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
