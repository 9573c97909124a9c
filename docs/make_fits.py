"""Writes docs/reference/fits.md: the largest model that fits a card, by the estimate of `--dry-run`.

    python docs/make_fits.py docs/reference/fits.md

A test compares the committed page with the output.
"""

import sys
from collections.abc import Iterable
from math import inf
from pathlib import Path

from tailrace.config import PolicyConfig
from tailrace.contracts.memory import GIB, ModelShape
from tailrace.drivers.assembly.machine import Machine, held_at_once
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.kinds.native import engine_memory
from tailrace.drivers.kinds.torch import trainer_memory
from tailrace.sim.cluster import MODELS

CARDS, LENGTHS, SEQUENCES, RANK = (24, 48, 80, 141), (2048, 8192, 32_768), 8, 16
KNOWN = sorted(
    (name for name in MODELS if name.startswith("Qwen3-") and "-A" not in name),
    key=lambda name: MODELS[name].num_parameters,
)
PLACEMENTS = {
    "one card, in turn": {"kind": "colocated", "devices": "gpus", "engines": [[0]], "trainer": [[0]]},
    "a card each": {"kind": "disaggregated", "devices": "gpus", "engines": [[0]], "trainer": [[1]]},
}
INTRODUCTION = f"""\
# Which model fits

Estimated, not measured: the sums of `tailrace train --dry-run` for the embedded engine and the trainer, in
bfloat16 with float32 weights and AdamW, activation checkpointing and a micro-batch of one sample. The engine
has room for {SEQUENCES} requests of the full length. A length is prompt and completion together. LoRA has
rank {RANK}. "In turn" is `placement.kind = "colocated"`: engine and trainer sleep while the other works. With
more cards, set `trainer.ranks`. `tailrace init --gpus` chooses all weights or an adapter by an estimate, too.
"""


def adapter_parameters(shape: ModelShape) -> int:
    """Parameters of adapters of all linear layers."""
    hidden, mlp, query, kv = shape.hidden_size, shape.mlp_size, shape.query_size, shape.kv_size
    return RANK * shape.num_layers * (2 * (hidden + query) + 2 * (hidden + kv) + 3 * (hidden + mlp))


def fits(shape: ModelShape, card_gib: int, placement: str, length: int, *, lora: bool) -> bool:
    """Whether all that is on each card at once is within its memory."""
    settings = {"device": "cuda", "dtype": "bfloat16", "kv_cache_tokens": SEQUENCES * length}
    trainer = {"device": "cuda", "dtype": "bfloat16", "activation_checkpointing": True}
    trainer |= {"max_tokens_per_microbatch": length, "min_tokens_per_microbatch": 1}
    config = PolicyConfig.model_validate(
        {
            "run": {"rounds": 1, "group_size": 8},
            "schedule": {"name": "serial"},
            "model": {"path": "model"},
            "data": {"kind": "rows", "path": "none.jsonl"},
            "sampling": {"max_completion_tokens": length},
            "engine": settings,
            "trainer": trainer | {"lora": {"rank": RANK} if lora else None},
            "placement": PLACEMENTS[placement],
        }
    )
    assert isinstance(config.engine, NativeEngineSettings)
    engine = engine_memory(shape, config.engine, length)
    processes = [trainer_memory(config, shape, length, adapter_parameters(shape) if lora else 0), engine]
    machine = Machine(1, inf, gpu_memory=card_gib * GIB, gpus=2)
    held = held_at_once(config, processes, machine)
    return all(sum(each.num * each.device_bytes for each in present) <= limit for _, limit, present in held)


def largest(card_gib: int, placement: str, length: int, *, lora: bool) -> str:
    """The largest of `KNOWN` that fits; a dash: none does."""
    found = [name for name in KNOWN if fits(MODELS[name], card_gib, placement, length, lora=lora)]
    return found[-1] if found else "-"


def page() -> str:
    """Return the page as Markdown."""
    heads = [f"{length:,} tokens" for length in LENGTHS]
    lines = [f"| card | trained | {'placement'} | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for card in CARDS:
        for lora, kind in ((False, "all weights"), (True, "LoRA")):
            for placement in PLACEMENTS:
                cells = [largest(card, placement, length, lora=lora) for length in LENGTHS]
                lines.append(f"| {card} GiB | {kind} | {placement} | {' | '.join(cells)} |")
    return "\n".join([INTRODUCTION, *lines, ""])


def main(arguments: Iterable[str]) -> None:
    """Write the page to each path given."""
    for path in arguments:
        Path(path).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
