"""The shape of a model, and the memory that one process needs. Imports no torch."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from tailrace.model_folder import context_length, read_config, tensor_shapes

MIB, GIB = 2**20, 2**30
STATE_BYTES = {"weights": 4, "gradients": 4, "optimizer": 8}
"""Bytes of each part of the trainer's state, for a parameter: AdamW has two moments, and all are float32."""
TORCH_BYTES, TRANSFORMERS_BYTES = 400 * MIB, 350 * MIB
"""A process that has imported torch and serves; one that has imported torch and transformers; measured."""
LOGIT_BYTES = 20
"""Bytes of a float32 logit: itself, scaled, log-prob, probability, gradient. To sample takes less."""
LEAST = (*STATE_BYTES, "one sequence")
"""The parts without which a process cannot work. The other parts of an estimate are upper bounds."""
_BLOCK = re.compile(r"\.(\d+)\.")
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A causal language model, as time and memory depend on it.

    Args:
        num_parameters: of all tensors; a head that is tied to the embedding counts once.
        head_size: dimensions of one attention head.
        mlp_size: width of the feed-forward layer; the sum over the experts that one token reaches.
        context_tokens: the longest sequence, prompt included.
        block_parameters: of the largest block.
        outside_parameters: of all tensors that are in no block: embedding, last norm, head.
    """

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocabulary: int
    context_tokens: int
    block_parameters: int = 0
    outside_parameters: int = 0

    @classmethod
    def read(cls, path: Path) -> "ModelShape":
        """Read config.json and the headers of the weights of a Hugging Face folder. Raises a ConfigError if a
        file is missing or damaged."""
        config = read_config(path)
        is_tied = bool(config.get("tie_word_embeddings"))
        blocks: defaultdict[str, int] = defaultdict(int)
        for name, shape in tensor_shapes(path).items():
            block = _BLOCK.search(name)
            blocks[block[1] if block else ""] += 0 if is_tied and name == _HEAD else prod(shape)
        heads, experts = config.get("num_attention_heads") or 1, config.get("num_experts_per_tok")
        mlp = (config.get("moe_intermediate_size") if experts else None) or config.get("intermediate_size")
        return cls(
            num_parameters=sum(blocks.values()),
            outside_parameters=blocks.pop("", 0),
            block_parameters=max(blocks.values(), default=0),
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            mlp_size=(mlp or 4 * config["hidden_size"]) * (experts or 1),
            vocabulary=config["vocab_size"],
            context_tokens=context_length(path),
        )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size

    def kv_bytes(self, item_bytes: int) -> int:
        """The bytes of one position: a key and a value in each layer."""
        return item_bytes * 2 * self.num_layers * self.kv_size


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory that one process needs on its device and in the host, in bytes by part.

    Args:
        name: of the process, or of several that are alike.
        device: a torch device; on "cpu" all parts are in host memory.
        num: how many such processes there are.
        on_device: held on the device, but for CUDA's context.
        in_host: held in host memory beside that.
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
        """Bytes of one process on its device."""
        return sum(self.on_device.values())

    @property
    def host_parts(self) -> Mapping[str, int]:
        """Parts of one process in host memory."""
        return {**self.in_host, **(self.on_device if self.device == "cpu" else {})}


def in_turn(processes: Sequence[ProcessMemory]) -> dict[str, list[ProcessMemory]]:
    """Return the bytes on one device that engines and trainer use in turn: while engines generate, with the
    memory that the sleeping trainer keeps, and while the trainer trains, with that of sleeping engines. The
    dry run, the planner and the simulator sum it up."""
    sleeping = {"generating": "trainer", "training": "engine"}
    return {
        turn: [replace(p, on_device=p.asleep) if p.name.startswith(side) else p for p in processes]
        for turn, side in sleeping.items()
    }


def gib(num_bytes: float) -> str:
    """A size in words."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.0f} MiB"
