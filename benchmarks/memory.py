"""The bound of memory that `tailrace train --dry-run` prints, against what the trainer's processes use.

    python benchmarks/memory.py [--json FILE] [--shape smollm2|qwen3] [--layers N] [--vocabulary N]
                                [--tokens N,N] [--dtype TYPE,TYPE] [--kind KIND,KIND] [--ranks N]
                                [--parallel N] [--beside]

Trains a model of the shape of SmolLM2-135M or Qwen3-0.6B with random weights on the CPU, for each number of
tokens, type and kind: two steps of one full micro-batch for each rank, a publication and a checkpoint, by the
processes that a run starts. The first step has no optimizer state yet, so the second one is the larger.

    bound_bytes  of each process, as --dry-run adds it up
    peak_bytes   of its resident memory (Linux only)

Ends with status 1 if a peak is more than OVER above its bound.

The kinds: "all" trains all weights, "checkpointing" with activation checkpointing, "lora" an adapter of rank
16. --beside: the checkpoint is written beside the second step. The largest default case needs 7 GiB;
Qwen3's shape with two ranks, a checkpoint beside and 256 tokens 26 GiB.
"""

import itertools
import random
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from common import QWEN3, run, save_model, write
from tailrace import clock
from tailrace.config import PolicyConfig
from tailrace.contracts.memory import gib
from tailrace.drivers.assembly.machine import run_memory
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.trainer import RemoteTrainer, TrainerJob, TrainerWorker, trainer_jobs
from tailrace.types import ITEM_BYTES, Group, Prompt, Sample, SampleId

PROMPT_TOKENS = 8
OVER = 0.05
"""The share of a bound by which a peak may exceed it."""
WORD_IDS = 1000
"""Random tokens are below it."""
Shape = Literal["smollm2", "qwen3"]
KINDS = ("all", "checkpointing", "lora")
SMOLLM2 = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {"smollm2": {"kind": "llama", **SMOLLM2}, "qwen3": QWEN3}


def make_config(
    model: Path, kind: str, dtype: str, tokens: int, ranks: int, parallel: int, beside: bool
) -> PolicyConfig:
    """The config of a run with this trainer; the data are not read."""
    trainer = {
        "ranks": ranks,
        "tensor_parallel": parallel,
        "dtype": dtype,
        "activation_checkpointing": kind == "checkpointing",
        "max_tokens_per_microbatch": tokens,
        "min_tokens_per_microbatch": 1,
        "lora": {"rank": 16} if kind == "lora" else None,
    }
    return PolicyConfig.model_validate(
        {
            "run": {"rounds": 1, "group_size": 2, "checkpoint_every": int(beside)},
            "schedule": {"name": "serial"},
            "model": {"path": model},
            "data": {"kind": "rows", "path": "none.jsonl"},
            "sampling": {"max_completion_tokens": tokens // 2},
            "engine": {"dtype": dtype},
            "trainer": trainer,
        }
    )


def make_group(number: int, num_tokens: int) -> list[Sample]:
    """Two samples that fill a micro-batch."""
    chance = random.Random(number)
    prompt = Prompt(number, [chance.randrange(WORD_IDS) for _ in range(PROMPT_TOKENS)])
    group = Group(prompt, 2, [])
    for index in range(2):
        sample = Sample(SampleId(number, 0, index), group, seed=index)
        ids = [chance.randrange(WORD_IDS) for _ in range(num_tokens // 2 - PROMPT_TOKENS)]
        sample.extend(ids, [-11.0] * len(ids), version=0)
        sample.advantage = 1.0 - 2 * index
        group.samples.append(sample)
    return group.samples


async def train(config: PolicyConfig, folder: Path, *, beside: bool) -> list[int]:
    """Train and return the peak of the resident memory of each process."""
    job = TrainerJob(
        threads=1,
        model=config.model.path,
        trainer=config.trainer,
        algorithm=config.algorithm,
        sampling=config.sampling,
        weights=config.weights,
        published_dtype=config.engine.dtype,
    )
    spawner = LocalSpawner(folder / "logs")
    workers = [await spawner.start(name, TrainerWorker, own) for name, own in trainer_jobs(job)]
    trainer = RemoteTrainer(workers, job)
    num_tokens = config.trainer.max_tokens_per_microbatch
    try:
        await trainer.ready()
        written = None
        for step in range(2):
            if step and beside:
                written = await trainer.save(folder / "checkpoint")
            units = [make_group(step * len(workers) + index, num_tokens) for index in range(len(workers))]
            await trainer.accumulate(units, version=0)
            await trainer.step()
        await trainer.publish(1)
        await (written or await trainer.save(folder / "checkpoint"))
        return [peak_of(each.process.pid) for each in workers]  # type: ignore[attr-defined]
    finally:
        await trainer.close()


def peak_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(config: PolicyConfig, *, beside: bool) -> tuple[int, list[int]]:
    """The bound of a process of the trainer, and the peak of each."""
    trainer = next(each for each in run_memory(config, PROMPT_TOKENS) if each.name == "trainer")
    with tempfile.TemporaryDirectory() as folder:
        peaks = clock.run(train(config, Path(folder), beside=beside), virtual=False)
    return sum(trainer.host_parts.values()), peaks


def main(
    shape: Shape = "smollm2",
    layers: Annotated[int, Parameter(help="in place of the shape's")] = 0,
    vocabulary: Annotated[int, Parameter(help=f"in place of the shape's, at least {WORD_IDS}")] = 0,
    tokens: str = "512,1024,2048",
    dtype: str = ",".join(ITEM_BYTES),
    kind: str = ",".join(KINDS),
    ranks: int = 1,
    parallel: Annotated[int, Parameter(help="processes that divide layers")] = 1,
    beside: bool = False,
    json: Path | None = None,
) -> None:
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        given = {"num_hidden_layers": layers, "vocab_size": vocabulary}
        save_model(
            model, dtype="bfloat16", **SHAPES[shape] | {key: size for key, size in given.items() if size}
        )
        for each in itertools.product(kind.split(","), dtype.split(","), map(int, tokens.split(","))):
            config = make_config(model, *each, ranks, parallel, beside)
            bound, peaks = measure(config, beside=beside)
            for rank, peak in enumerate(peaks):
                case = dict(zip(("kind", "dtype", "tokens"), each, strict=True)) | {"rank": rank}
                cases.append({**case, "bound_bytes": bound, "peak_bytes": peak})
                print(f"{case}: bound {gib(bound)}, peak {gib(peak)}, {peak / bound:.2f}", flush=True)
    write(json, cases)
    if any(case["peak_bytes"] > (1 + OVER) * case["bound_bytes"] for case in cases):
        sys.exit(1)


if __name__ == "__main__":
    run(main)
