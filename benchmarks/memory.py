"""The memory that `tailrace train --dry-run` estimates, against what the trainer's processes use.

    python benchmarks/memory.py [--json FILE] [--ranks N] [--layers N] [--vocabulary N]
                                [--tokens N] [--lora RANK] [--wait]

Trains a model of the shape of Qwen3-0.6B with random weights on the CPU: two steps of one micro-batch for
each rank, in bfloat16, with activation checkpointing, a publication and a checkpoint, by the processes that
a run starts. The first step has no optimizer state yet, so the second one is the larger. The checkpoint is
written beside it.

    estimate_bytes  of the process that needs most, as --dry-run prints it
    peak_bytes      its peak resident memory (VmHWM); Linux only
    ranks           both for each process

Needs about 26 GiB of memory with the defaults, 17 GiB with --wait, and 5 GB of disk in the temporary folder.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tailrace import clock
from tailrace.commands.memory import memory_table, run_memory
from tailrace.config import RunConfig
from tailrace.memory import gib
from tailrace.types import Group, Prompt, Sample, SampleId
from tailrace.workers.messages import TrainerJob
from tailrace.workers.spawner import LocalSpawner
from tailrace.workers.trainer import RemoteTrainer, TrainerProcess, processes_of

PROMPT_TOKENS = 8
WORD_IDS = 1000
"""Random tokens are below it."""


def make_model(folder: Path, num_layers: int, vocabulary: int) -> None:
    """Save a Qwen3-0.6B of so many layers and tokens with random weights, in bfloat16."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def make_config(model: Path, arguments: argparse.Namespace) -> RunConfig:
    """The config of a run with this trainer; the data are not read."""
    trainer = {
        "ranks": arguments.ranks,
        "dtype": arguments.dtype,
        "activation_checkpointing": not arguments.keep_activations,
        "max_tokens_per_microbatch": arguments.tokens,
        "min_tokens_per_microbatch": 1,
        "lora": {"rank": arguments.lora} if arguments.lora else None,
        "async_checkpoints": not arguments.wait,
    }
    return RunConfig.model_validate(
        {
            "run": {"rounds": 1, "group_size": 2},
            "schedule": {"name": "serial"},
            "model": {"path": model},
            "data": {"kind": "rows", "path": "none.jsonl", "max_prompt_tokens": PROMPT_TOKENS},
            "sampling": {"max_completion_tokens": arguments.tokens},
            "engine": {"dtype": "bfloat16"},
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


async def train(config: RunConfig, folder: Path, num_tokens: int) -> list[int]:
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
        published_dtype="bfloat16",
    )
    spawner = LocalSpawner(folder / "logs")
    named = [await TrainerProcess.spawn(name, own, spawner) for name, own in processes_of(job)]
    trainer = RemoteTrainer(named)
    try:
        await trainer.ready()
        written = None
        for step in range(2):
            if step:  # the checkpoint is written beside the second step
                written = await trainer.save(folder / "checkpoint")
            units = [make_group(step * len(named) + index, num_tokens) for index in range(len(named))]
            await trainer.accumulate(units, version=0)
            stats = await trainer.step()
            print(f"step {stats.num_steps}: {stats.num_tokens} tokens, {stats.compute_s:.0f} s", flush=True)
        await trainer.publish(1)
        if written:
            await written
        return [peak_bytes(each.process.pid) for each in named]
    finally:
        await trainer.close()


def peak_bytes(pid: int) -> int:
    """The peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936, help=f"tokens, at least {WORD_IDS}")
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--keep-activations", action="store_true", help="no activation checkpointing")
    parser.add_argument("--lora", type=int, metavar="RANK")
    parser.add_argument(
        "--wait", action="store_true", help="the trainer waits until the checkpoint is written"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model", arguments.layers, arguments.vocabulary)
        config = make_config(folder / "model", arguments)
        processes = run_memory(config)
        print(memory_table(processes))
        estimates = [each.host_bytes for each in processes if "trainer" in each.name for _ in range(each.num)]
        peaks = clock.run(train(config, folder, arguments.tokens), virtual=False)
    rows = [
        {"estimate_bytes": estimate, "peak_bytes": peak}
        for estimate, peak in zip(estimates, peaks, strict=True)
    ]
    for rank, row in enumerate(rows):
        ratio = row["peak_bytes"] / row["estimate_bytes"]
        print(
            f"rank {rank}: estimate {gib(row['estimate_bytes'])}, peak {gib(row['peak_bytes'])}, {ratio:.2f}"
        )
    if arguments.json:
        largest = max(rows, key=lambda row: row["estimate_bytes"])
        arguments.json.write_text(json.dumps(largest | {"ranks": rows}, indent=2))


if __name__ == "__main__":
    main()
