"""The shape of a model as its memory depends on it, and the memory that one process needs. Imports no torch.

An estimate is the sum of the parts that are held at the same time, in the phase in which it is largest.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from tailrace.model_folder import read_config, tensor_headers, weight_files

GIB = 2**30
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = {"weights": 4, "gradients": 4, "optimizer": 8}
"""Of each part of the trainer's state, for a parameter: AdamW has two moments, and all are float32."""
TRANSFORMERS_BYTES = 350 * 2**20
"""A process that has imported torch and transformers; measured."""
_STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_BLOCK = re.compile(r"\.(\d+)\.")
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A causal language model.

    Args:
        num_parameters: of all tensors; a head that is tied to the embedding counts once.
        block_parameters: of the largest block.
        outside_parameters: of all tensors that are in no block: embedding, last norm, head.
        tensor_parameters: of the largest tensor.
        query_size, kv_size: heads times their dimension.
        mlp_size: width of the feed-forward layer; the sum over the experts that one token reaches.
        head_norms: whether queries and keys are normalised, head by head.
        stored_bytes: size of the files.
    """

    num_parameters: int
    block_parameters: int
    outside_parameters: int
    tensor_parameters: int
    num_layers: int
    hidden_size: int
    query_size: int
    kv_size: int
    mlp_size: int
    vocabulary: int
    stored_bytes: int
    head_norms: bool = False

    @classmethod
    def read(cls, path: Path) -> "ModelShape":
        """Read config.json and the headers of the weights of a Hugging Face folder that was checked. Raises a
        ConfigError if a file is missing."""
        config = read_config(path)
        is_tied = bool(config.get("tie_word_embeddings"))
        headers = [header for file in weight_files(path) for header in tensor_headers(file)]
        sizes = {name: prod(shape) for name, shape, _ in headers if not (is_tied and name == _HEAD)}
        blocks: defaultdict[str, int] = defaultdict(int)
        for name, size in sizes.items():
            block = _BLOCK.search(name)
            blocks[block[1] if block else ""] += size
        outside = blocks.pop("", 0)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        experts = config.get("num_experts_per_tok")
        mlp = (config.get("moe_intermediate_size") or config["intermediate_size"]) if experts else None
        return cls(
            num_parameters=sum(sizes.values()),
            block_parameters=max(blocks.values(), default=0),
            outside_parameters=outside,
            tensor_parameters=max(sizes.values()),
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            query_size=heads * head_dim,
            kv_size=(config.get("num_key_value_heads") or heads) * head_dim,
            mlp_size=mlp * experts if mlp and experts else config["intermediate_size"],
            vocabulary=config["vocab_size"],
            stored_bytes=sum(prod(shape) * _STORED_BYTES.get(dtype, 4) for _, shape, dtype in headers),
            head_norms=any(name.endswith(".q_norm.weight") for name in sizes),
        )


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What one process needs on its device and in host memory, in bytes by part.

    Args:
        name: of the process, or of several that are alike.
        device: a torch device; on "cpu" all parts are in host memory.
        num: how many such processes there are.
        on_device: held at the same time on the device.
        in_host: held at the same time in host memory, by a process whose device is not the CPU.
        asleep: held on the device while the process sleeps, because another one uses it.
    """

    name: str
    device: str
    on_device: Mapping[str, int]
    in_host: Mapping[str, int]
    num: int = 1
    asleep: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """Of one process, on its device."""
        return sum(self.on_device.values())

    @property
    def host_bytes(self) -> int:
        """Of one process, in host memory."""
        return sum(self.in_host.values()) + (self.device_bytes if self.device == "cpu" else 0)


def in_turn(processes: Sequence[ProcessMemory]) -> dict[str, list[ProcessMemory]]:
    """What stands on one device that engines and trainer use in turn: while engines generate, beside what the
    sleeping trainer keeps, and while the trainer trains, beside what sleeping engines keep. The dry run, the
    planner and the simulator sum it up."""
    sleeping = {"generating": "trainer", "training": "engine"}
    return {
        turn: [replace(p, on_device=p.asleep) if p.name.startswith(side) else p for p in processes]
        for turn, side in sleeping.items()
    }


def largest_phase(phases: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the parts of the phase whose sum is largest, without empty ones."""
    parts = max(phases.values(), key=lambda phase: sum(phase.values()))
    return {name: size for name, size in parts.items() if size}


def gib(num_bytes: float) -> str:
    """A size in words."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.0f} MiB"
