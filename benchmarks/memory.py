"""The memory that `tailrace train --dry-run` estimates, against what the trainer's processes use.

    python benchmarks/memory.py [--json FILE] [--shape smollm2|qwen3] [--layers N] [--vocabulary N]
                                [--tokens N ...] [--dtype TYPE ...] [--kind KIND ...] [--ranks N] [--beside]

Trains a model of the shape of SmolLM2-135M or Qwen3-0.6B with random weights on the CPU, for each number of
tokens, type and kind: two steps of one full micro-batch for each rank, a publication and a checkpoint, by the
processes that a run starts. The first step has no optimizer state yet, so the second one is the larger.

    estimate_bytes  of each process, as --dry-run adds it up
    peak_bytes      its peak resident memory (VmHWM); Linux only

The kinds: "all" trains all weights, "checkpointing" with activation checkpointing, "lora" an adapter of rank
16. --beside: the checkpoint is written beside the second step. The largest default case needs 7 GiB;
Qwen3's shape with two ranks, a checkpoint beside and 256 tokens 26 GiB.
"""

import argparse
import itertools
import json
import random
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from tailrace import clock
from tailrace.assembly.memory import run_memory
from tailrace.config import RunConfig
from tailrace.memory import ITEM_BYTES, gib
from tailrace.types import Group, Prompt, Sample, SampleId
from tailrace.workers.messages import TrainerJob
from tailrace.workers.spawner import LocalSpawner
from tailrace.workers.trainer import RemoteTrainer, TrainerProcess, processes_of

PROMPT_TOKENS = 8
WORD_IDS = 1000
"""Random tokens are below it."""
KINDS = ("all", "checkpointing", "lora")
SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2": LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    ),
    "qwen3": Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
    ),
}


def make_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Save a model with random weights, in bfloat16."""
    torch.manual_seed(0)
    config = SHAPES[arguments.shape]
    config.tie_word_embeddings = True
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    config.num_hidden_layers = arguments.layers or config.num_hidden_layers
    config.vocab_size = arguments.vocabulary or config.vocab_size
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def make_config(model: Path, arguments: argparse.Namespace, tokens: int, dtype: str, kind: str) -> RunConfig:
    """The config of a run with this trainer; the data are not read."""
    trainer = {
        "ranks": arguments.ranks,
        "dtype": dtype,
        "activation_checkpointing": kind == "checkpointing",
        "max_tokens_per_microbatch": tokens,
        "min_tokens_per_microbatch": 1,
        "lora": {"rank": 16} if kind == "lora" else None,
    }
    return RunConfig.model_validate(
        {
            "run": {"rounds": 1, "group_size": 2, "checkpoint_every": int(arguments.beside)},
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
    named = [await TrainerProcess.spawn(name, own, spawner) for name, own in processes_of(job)]
    trainer = RemoteTrainer(named)
    num_tokens = config.trainer.max_tokens_per_microbatch
    try:
        await trainer.ready()
        written = None
        for step in range(2):
            if step and beside:
                written = await trainer.save(folder / "checkpoint")
            units = [make_group(step * len(named) + index, num_tokens) for index in range(len(named))]
            await trainer.accumulate(units, version=0)
            await trainer.step()
        await trainer.publish(1)
        await (written or await trainer.save(folder / "checkpoint"))
        return [peak_bytes(each.process.pid) for each in named]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--layers", type=int, help="in place of the shape's")
    parser.add_argument("--vocabulary", type=int, help=f"in place of the shape's, at least {WORD_IDS}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="of a micro-batch")
    parser.add_argument("--dtype", choices=ITEM_BYTES, nargs="+", default=list(ITEM_BYTES))
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--beside", action="store_true", help="the checkpoint is beside the second step")
    arguments = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        make_model(model, arguments)
        for kind, dtype, tokens in itertools.product(arguments.kind, arguments.dtype, arguments.tokens):
            config = make_config(model, arguments, tokens, dtype, kind)
            for rank, row in enumerate(measure(config, beside=arguments.beside)):
                estimate, peak = row["estimate_bytes"], row["peak_bytes"]
                cases.append({"kind": kind, "dtype": dtype, "tokens": tokens, "rank": rank, **row})
                print(
                    f"{kind:13} {dtype:8} {tokens:5} tokens, rank {rank}: "
                    f"estimate {gib(estimate)}, peak {gib(peak)}, {peak / estimate:.2f}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(cases, indent=2))


if __name__ == "__main__":
    main()
