"""Where keys and values live: one contiguous tensor for each class of length (a tier).

A response sits in the smallest tier that holds its tokens; one that outgrows it is copied to the next.
In a tier the responses fill the slots [0, n): one that leaves gives its slot to the last. So attention
reads one contiguous view a tier, cut at the tier's longest response, and computes no padding worth
naming: lengths within a tier differ by less than `GROWTH`.

What must hold: reserved positions (occupied slots times capacity) never exceed the budget, nor do
allocated ones; whatever lies beyond a response's length in its slot is finite, because attention
weighs it with zero.

Suffixes: _L layers, _S slots, _K key-value heads, _D head dimension, _C capacity, _N positions.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tailrace.engine.native.architecture import Architecture

SMALLEST = 80
GROWTH = 1.6


@dataclass(eq=False, slots=True)
class Response:
    """One request being served. While it runs, the cache holds all of its tokens but the last."""

    id: str
    tokens: list[int]
    """Prompt and completion."""
    num_prompt: int
    stream: int
    """Of the noise that its tokens are drawn with (sampler.py)."""
    logprobs: list[float] = field(default_factory=list)
    """Of the last tokens: those not yet reported."""
    tier: "Tier | None" = None
    """None while it waits."""
    prompt_version: int | None = None
    """Which weights computed the prompt in its cache; None once they are not the newest."""

    @property
    def num_completion(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True)
class Block:
    """Keys and values of consecutive positions from 0, both [L, N, K, D]."""

    keys: Tensor
    values: Tensor


class Tier:
    """The responses of one class of length."""

    def __init__(self, capacity: int, arch: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        self.capacity = capacity
        self.responses: list[Response] = []
        shape = arch.num_layers, 0, arch.num_kv_heads
        self._hold(
            torch.empty(*shape, arch.head_dim, capacity, device=device, dtype=dtype),
            torch.empty(*shape, capacity, arch.head_dim, device=device, dtype=dtype),
        )

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        """[L, S, K, D, C]: transposed, so that the product with a few queries runs along the positions."""
        self.values = values
        """[L, S, K, C, D]"""
        self.key_rows = [layer.permute(0, 3, 1, 2) for layer in keys]
        """For each layer [S, C, K, D], to write one position of each slot."""
        self.value_rows = [layer.transpose(1, 2) for layer in values]
        """For each layer [S, C, K, D]."""
        self.key_matrices, self.value_matrices = keys.flatten(1, 2), values.flatten(1, 2)
        """[L, S * K, D, C] and [L, S * K, C, D], to multiply."""
        self.slots = torch.arange(keys.shape[1], device=keys.device)
        self._keys, self._values = _quick(keys), _quick(values)
        """The same memory, to copy slots."""

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    def resize(self, num_slots: int) -> None:
        """Allocate exactly so many slots, at least as many as are occupied."""
        kept = len(self.responses)
        assert num_slots >= kept, (num_slots, kept)
        keys, values = (old.new_empty(old.shape[0], num_slots, *old.shape[2:]) for old in self._tensors)
        keys[:, :kept], values[:, :kept] = self.keys[:, :kept], self.values[:, :kept]
        self._hold(keys, values)

    @property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def write(self, slot: int, block: Block) -> None:
        num_tokens = block.keys.shape[1]
        self._keys[:, slot, :, :, :num_tokens] = _quick(block.keys.permute(0, 2, 3, 1))
        self._keys[:, slot, :, :, num_tokens:] = 0
        self._values[:, slot, :, :num_tokens] = _quick(block.values.transpose(1, 2))
        self._values[:, slot, :, num_tokens:] = 0

    def read(self, slot: int, num_tokens: int) -> Block:
        """A view."""
        keys = self.keys[:, slot, :, :, :num_tokens].permute(0, 3, 1, 2)
        return Block(keys, self.values[:, slot, :, :num_tokens].transpose(1, 2))

    def vacate(self, response: Response) -> None:
        """Free its slot; the last response moves into it."""
        slot = self.responses.index(response)
        last = self.responses.pop()
        if last is not response:
            self.responses[slot] = last
            self._keys[:, slot] = self._keys[:, len(self.responses)]
            self._values[:, slot] = self._values[:, len(self.responses)]


def _quick(tensor: Tensor) -> Any:
    """The same memory, as numpy sees it where it can: it needs half of torch's time to copy a slot."""
    return tensor.numpy() if tensor.device.type == "cpu" and tensor.dtype == torch.float32 else tensor


class Cache:
    """All tiers, and the budget in positions that they share.

    Args:
        max_tokens: the longest context, at most the budget.
        budget: positions that may be reserved.
    """

    def __init__(
        self, arch: Architecture, *, max_tokens: int, budget: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.budget = budget
        self.tiers = [Tier(c, arch, device, dtype) for c in capacities(max_tokens)]

    @property
    def num_reserved(self) -> int:
        """Positions of the occupied slots."""
        return sum(len(tier.responses) * tier.capacity for tier in self.tiers)

    @property
    def num_allocated(self) -> int:
        return sum(tier.num_slots * tier.capacity for tier in self.tiers)

    def tier_for(self, num_tokens: int) -> Tier:
        return next(tier for tier in self.tiers if tier.capacity >= num_tokens)

    def has_room(self, response: Response) -> bool:
        """Whether it can have a slot for its tokens, once it has left the one it holds."""
        held = 0 if response.tier is None else response.tier.capacity
        return self.num_reserved - held + self.tier_for(len(response.tokens)).capacity <= self.budget

    def spare_for(self, response: Response) -> int:
        """Positions of the budget that stay free if it enters, whatever its tier must allocate."""
        tier = self.tier_for(len(response.tokens))
        grows = len(tier.responses) == tier.num_slots
        return self.budget - self.num_allocated - (tier.capacity * max(4, tier.num_slots) if grows else 0)

    def enter(self, response: Response) -> None:
        """Give it a slot; what the slot holds is undefined until `write`, which must follow."""
        tier = self.tier_for(len(response.tokens))
        if len(tier.responses) == tier.num_slots:
            self._enlarge(tier)
        tier.responses.append(response)
        response.tier = tier

    def _enlarge(self, tier: Tier) -> None:
        """To twice its slots as far as the budget goes; other tiers give back what they do not use."""
        if self.budget - self.num_allocated < tier.capacity:
            for other in self.tiers:
                if other.num_slots > len(other.responses):
                    other.resize(len(other.responses))
        affordable = (self.budget - self.num_allocated) // tier.capacity
        tier.resize(tier.num_slots + min(max(4, tier.num_slots), affordable))

    def leave(self, response: Response) -> None:
        assert response.tier is not None
        response.tier.vacate(response)
        response.tier = None
        response.prompt_version = None

    def move(self, response: Response) -> None:
        """To the tier that its tokens need now."""
        assert response.tier is not None
        version = response.prompt_version
        view = self.read(response, len(response.tokens) - 1)
        block = Block(view.keys.clone(), view.values.clone())
        self.leave(response)
        self.enter(response)
        self.write(response, block)
        response.prompt_version = version

    def write(self, response: Response, block: Block) -> None:
        """Fill its slot from position 0."""
        assert response.tier is not None
        response.tier.write(response.tier.responses.index(response), block)

    def read(self, response: Response, num_tokens: int) -> Block:
        """A view of its first positions."""
        assert response.tier is not None
        return response.tier.read(response.tier.responses.index(response), num_tokens)

    def responses(self) -> list[Response]:
        """All, in the order of tiers and slots: the rows of a decode step."""
        return list(chain.from_iterable(tier.responses for tier in self.tiers))

    def check_integrity(self) -> None:
        """Slots free and used make the total, positions stay in the budget, everybody is where it says."""
        assert self.num_reserved <= self.num_allocated <= self.budget, (self.num_allocated, self.budget)
        for tier in self.tiers:
            assert len(tier.responses) <= tier.num_slots
            assert len(set(map(id, tier.responses))) == len(tier.responses)
            for response in tier.responses:
                assert response.tier is tier, response.id
                assert len(response.tokens) - 1 <= tier.capacity, response.id


def capacities(max_tokens: int) -> list[int]:
    """Of the tiers: growing geometrically, the last exactly `max_tokens`.

    Odd multiples of 16: rows that lie a power of two apart evict each other from a CPU's caches.
    """
    sizes, size = [], float(SMALLEST)
    while size < max_tokens:
        sizes.append(int(size) // 32 * 32 + 16)
        size *= GROWTH
    return [*(c for c in sizes if c < max_tokens), max_tokens]
