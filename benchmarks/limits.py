"""Physical limits of a device: what a step must compute over its arithmetic, and what it must read and write
over its bandwidth; the longer of the two. A limit is that of dense kernels that wait for nothing."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

ITEM = 2
"""Bytes of a bfloat16 number."""
OPTIMIZER_BYTES = 28
"""AdamW in float32: reads weight, gradient and two moments, writes weight and moments."""


class Card(NamedTuple):
    """`bandwidth`: bytes a second of its memory. `arithmetic`: dense bfloat16 operations a second."""

    name: str
    bandwidth: float
    arithmetic: float


CARDS = [
    Card("B200", 8.0e12, 2250e12),
    Card("H200", 4.8e12, 989e12),
    Card("H100 PCIe", 2.0e12, 756e12),
    Card("H100 NVL", 3.9e12, 835e12),
    Card("H100", 3.35e12, 989e12),
    Card("A100-SXM4-40GB", 1.555e12, 312e12),
    Card("A100", 2.039e12, 312e12),
    Card("L40S", 0.864e12, 362e12),
    Card("RTX 4090", 1.008e12, 165e12),
]
"""Vendors' figures. The first whose name is in that of the device."""


def card(device: str) -> Card:
    """The figures of a device: of `CARDS`, or measured by a copy and a matrix product."""
    name = torch.cuda.get_device_name(device) if device != "cpu" else "cpu"
    if known := next((each for each in CARDS if each.name in name), None):
        return known
    size, number = (8192, 2**28) if device != "cpu" else (512, 2**23)
    factor = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    source, target = (torch.ones(number, dtype=torch.bfloat16, device=device) for _ in range(2))
    copy_s, product_s = (
        min(seconds(work, device) for _ in range(5))
        for work in (lambda: target.copy_(source), lambda: factor @ factor)
    )
    return Card(f"{name} (measured)", 2 * ITEM * number / copy_s, 2 * size**3 / product_s)


def seconds(work: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class Shape(NamedTuple):
    """Sizes of a dense model with gated MLPs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @classmethod
    def of(cls, sizes: dict[str, Any]) -> "Shape":
        return cls(*(sizes[name] for name in cls._fields))

    @property
    def layers(self) -> int:
        """Parameters of the matrices of all layers."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return (
            self.num_hidden_layers * self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        )

    @property
    def head(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def pair(self) -> int:
        """Operations of attention for one token and one key."""
        return 4 * self.num_hidden_layers * self.num_attention_heads * self.head_dim

    @property
    def key(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * ITEM * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


def training_s(shape: Shape, card: Card, groups: Sequence[tuple[int, Sequence[int]]], lora: bool) -> float:
    """The least seconds of an optimizer step. The prompt of a group is computed once, nothing is computed
    again, and adapters cost nothing; frozen weights have no gradient.

    Args:
        groups: for each prompt its tokens, and those of each completion.
    """
    tokens = sum(prompt + sum(lengths) for prompt, lengths in groups)
    targets = sum(sum(lengths) for _, lengths in groups)
    pairs = sum(
        prompt**2 / 2 + sum(length * prompt + length**2 / 2 for length in lengths)
        for prompt, lengths in groups
    )
    products = 2 * (tokens * shape.layers + targets * shape.head)
    operations = (2 if lora else 3) * products + 3 * shape.pair * pairs
    weights = shape.layers + shape.head
    moved = 2 * ITEM * weights if lora else (2 * ITEM + OPTIMIZER_BYTES) * weights
    return max(operations / card.arithmetic, moved / card.bandwidth)


def generation_s(shape: Shape, card: Card, requests: Sequence[tuple[int, int]]) -> float:
    """The least seconds to generate for requests (prompt tokens, completion tokens) that arrive together and
    all fit: the prompts at once, then a decode step for each further token."""
    prompts = [prompt for prompt, _ in requests]
    weights = ITEM * (shape.layers + shape.head)

    def step(tokens: int, pairs: float, heads: int, keys: int) -> float:
        operations = 2 * (tokens * shape.layers + heads * shape.head) + shape.pair * pairs
        return max(operations / card.arithmetic, (weights + shape.key * keys) / card.bandwidth)

    total = step(sum(prompts), sum(each**2 / 2 for each in prompts), len(prompts), sum(prompts))
    for number in range(1, max(length for _, length in requests)):
        keys = [prompt + number for prompt, length in requests if length > number]
        total += step(len(keys), sum(keys), len(keys), sum(keys))
    return total
