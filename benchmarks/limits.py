"""Physical limits of a device: what a step must compute over its arithmetic, and what it must read and write
over its bandwidth; the longer of the two. A limit is that of dense kernels that wait for nothing."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tailrace.contracts.memory import ModelShape
from tailrace.sim.cluster import multiplied_parameters
from tailrace.sim.device_profiles import PROFILES

ITEM = 2
"""Bytes of a bfloat16 number."""
OPTIMIZER_BYTES = 28
"""AdamW in float32: reads weight, gradient and two moments, writes weight and moments."""


class Card(NamedTuple):
    """`bandwidth`: bytes a second of its memory. `arithmetic`: dense bfloat16 operations a second."""

    name: str
    bandwidth: float
    arithmetic: float


SIMULATED = {"H200": "H200", "H100": "H100", "A100-SXM4-40GB": "A100-40G", "RTX 4090": "RTX 4090"}
"""Names of devices, and those of their profiles for simulations."""
CARDS = [
    Card("B200", 8.0e12, 2250e12),
    Card("H100 PCIe", 2.0e12, 756e12),
    Card("H100 NVL", 3.9e12, 835e12),
    *(Card(name, PROFILES[key].bytes_per_s, PROFILES[key].flops) for name, key in SIMULATED.items()),
    Card("A100", 2.039e12, 312e12),
    Card("L40S", 0.864e12, 362e12),
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


def layer_parameters(shape: ModelShape) -> int:
    """Parameters of the matrices of all layers."""
    return shape.num_layers * multiplied_parameters(shape)


def head_parameters(shape: ModelShape) -> int:
    return shape.vocabulary * shape.hidden_size


def pair_operations(shape: ModelShape) -> int:
    """Operations of attention for one token and one key."""
    return 4 * shape.num_layers * shape.query_size


def training_s(
    shape: ModelShape, card: Card, groups: Sequence[tuple[int, Sequence[int]]], lora: bool
) -> float:
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
    layers, head = layer_parameters(shape), head_parameters(shape)
    products, weights = 2 * (tokens * layers + targets * head), layers + head
    operations = (2 if lora else 3) * products + 3 * pair_operations(shape) * pairs
    moved = 2 * ITEM * weights if lora else (2 * ITEM + OPTIMIZER_BYTES) * weights
    return max(operations / card.arithmetic, moved / card.bandwidth)


def generation_s(shape: ModelShape, card: Card, requests: Sequence[tuple[int, int]]) -> float:
    """The least seconds to generate for requests (prompt tokens, completion tokens) that arrive together and
    all fit: the prompts at once, then a decode step for each further token."""
    prompts = [prompt for prompt, _ in requests]
    layers, head, key = layer_parameters(shape), head_parameters(shape), shape.kv_bytes(ITEM)

    def step(tokens: int, pairs: float, heads: int, keys: int) -> float:
        operations = 2 * (tokens * layers + heads * head) + pair_operations(shape) * pairs
        moved = ITEM * (layers + head) + key * keys
        return max(operations / card.arithmetic, moved / card.bandwidth)

    total = step(sum(prompts), sum(each**2 / 2 for each in prompts), len(prompts), sum(prompts))
    for number in range(1, max(length for _, length in requests)):
        keys = [prompt + number for prompt, length in requests if length > number]
        total += step(len(keys), sum(keys), len(keys), sum(keys))
    return total
