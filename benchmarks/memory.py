"""The memory that `tailrace train --dry-run` estimates, against what the trainer's processes use.

    python benchmarks/memory.py [--json FILE] [--shape smollm2|qwen3] [--layers N] [--vocabulary N]
                                [--tokens N,N] [--dtype TYPE,TYPE] [--kind KIND,KIND] [--ranks N] [--beside]

Trains a model of the shape of SmolLM2-135M or Qwen3-0.6B with random weights on the CPU, for each number of
tokens, type and kind: two steps of one full micro-batch for each rank, a publication and a checkpoint, by the
processes that a run starts. The first step has no optimizer state yet, so the second one is the larger.

    estimate_bytes  of each process, as --dry-run adds it up
    peak_bytes      its peak resident memory (VmHWM); Linux only

The kinds: "all" trains all weights, "checkpointing" with activation checkpointing, "lora" an adapter of rank
16. --beside: the checkpoint is written beside the second step. The largest default case needs 7 GiB;
Qwen3's shape with two ranks, a checkpoint beside and 256 tokens 26 GiB.
"""

import itertools
import random
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from common import run, write
from tailrace import clock
from tailrace.assembly.memory import run_memory
from tailrace.config import RunConfig
from tailrace.memory import ITEM_BYTES, gib
from tailrace.types import Group, Prompt, Sample, SampleId
from tailrace.workers.process import LocalSpawner
from tailrace.workers.trainer import RemoteTrainer, TrainerJob, TrainerWorker, trainer_jobs

PROMPT_TOKENS = 8
WORD_IDS = 1000
"""Random tokens are below it."""
Shape = Literal["smollm2", "qwen3"]
KINDS = ("all", "checkpointing", "lora")
SMOLLM2 = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
QWEN3 = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2": LlamaConfig(**SMOLLM2),
    "qwen3": Qwen3Config(**QWEN3, max_position_embeddings=40_960),
}


def make_model(folder: Path, config: PreTrainedConfig, layers: int, vocabulary: int) -> None:
    """Save a model with random weights, in bfloat16."""
    torch.manual_seed(0)
    config.tie_word_embeddings = True
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    config.num_hidden_layers = layers or config.num_hidden_layers
    config.vocab_size = vocabulary or config.vocab_size
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def make_config(model: Path, kind: str, dtype: str, tokens: int, ranks: int, beside: bool) -> RunConfig:
    """The config of a run with this trainer; the data are not read."""
    trainer = {
        "ranks": ranks,
        "dtype": dtype,
        "activation_checkpointing": kind == "checkpointing",
        "max_tokens_per_microbatch": tokens,
        "min_tokens_per_microbatch": 1,
        "lora": {"rank": 16} if kind == "lora" else None,
    }
    return RunConfig.model_validate(
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


async def train(config: RunConfig, folder: Path, *, beside: bool) -> list[int]:
    """Train and return the peak resident memory of each process."""
    assert config.model
    assert config.sampling
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
        return [peak_bytes(each.process.pid) for each in workers]
    finally:
        await trainer.close()


def peak_bytes(pid: int) -> int:
    """The peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(config: RunConfig, *, beside: bool) -> list[dict[str, int]]:
    """Estimate and peak of each process of the trainer."""
    processes = [each for each in run_memory(config, PROMPT_TOKENS) if "trainer" in each.name]
    estimates = [each.host_bytes for each in processes for _ in range(each.num)]
    with tempfile.TemporaryDirectory() as folder:
        peaks = clock.run(train(config, Path(folder), beside=beside), virtual=False)
    pairs = zip(estimates, peaks, strict=True)
    return [{"estimate_bytes": estimate, "peak_bytes": peak} for estimate, peak in pairs]


def main(
    shape: Shape = "smollm2",
    layers: Annotated[int, Parameter(help="in place of the shape's")] = 0,
    vocabulary: Annotated[int, Parameter(help=f"in place of the shape's, at least {WORD_IDS}")] = 0,
    tokens: str = "512,1024,2048",
    dtype: str = ",".join(ITEM_BYTES),
    kind: str = ",".join(KINDS),
    ranks: int = 1,
    beside: bool = False,
    json: Path | None = None,
) -> None:
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        make_model(model, SHAPES[shape], layers, vocabulary)
        for each in itertools.product(kind.split(","), dtype.split(","), map(int, tokens.split(","))):
            config = make_config(model, *each, ranks, beside)
            for rank, row in enumerate(measure(config, beside=beside)):
                estimate, peak = row["estimate_bytes"], row["peak_bytes"]
                case = dict(zip(("kind", "dtype", "tokens"), each, strict=True)) | {"rank": rank}
                cases.append({**case, **row})
                print(
                    f"{case}: estimate {gib(estimate)}, peak {gib(peak)}, {peak / estimate:.2f}", flush=True
                )
    write(json, cases)


if __name__ == "__main__":
    run(main)
