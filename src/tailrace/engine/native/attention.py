"""Attention of a decode step and of prompts, over the tiers of the cache.

Both are called by the model once a layer. Suffixes as in model.py and cache.py.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from tailrace.engine.native.architecture import Architecture
from tailrace.engine.native.cache import Block, Tier


class TierStep:
    """What one decode step needs of a tier.

    Args:
        rows: of the batch: the tier's slots, in order.
        positions: [n], where each slot writes.
        longest: positions of the longest response, the new one included.
        ragged: whether another one is shorter.
    """

    def __init__(self, tier: Tier, rows: slice, positions: Tensor, longest: int, ragged: bool) -> None:
        self.rows = rows
        self.place = tier.slots[: len(tier.responses)], positions
        self.key_rows, self.value_rows = tier.key_rows, tier.value_rows
        num_matrices = len(tier.responses) * tier.keys.shape[2]
        self.shape = num_matrices, -1, tier.keys.shape[3]
        self.keys = tier.key_matrices[:, :num_matrices, :, :longest].unbind()
        """Of each layer [n * K, D, longest]."""
        self.values = tier.value_matrices[:, :num_matrices, :longest].unbind()
        """Of each layer [n * K, longest, D]."""
        self.mask = _mask(tier, positions, longest) if ragged else None


def _mask(tier: Tier, positions: Tensor, longest: int) -> Tensor:
    """[n * K, 1, longest]: -inf beyond each response's length."""
    beyond = torch.arange(longest, device=positions.device) > positions[:, None, None, None]
    mask = tier.keys.new_zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
    return mask.expand(-1, tier.keys.shape[2], 1, -1).reshape(-1, 1, longest)


class DecodeAttention:
    """One new position for every running response.

    Args:
        tiers: those with responses.
        lengths: tokens of each response, in the order of the rows: tier by tier, slot by slot.
        positions: [n], the lengths minus one.
    """

    def __init__(self, tiers: Sequence[Tier], lengths: Sequence[int], positions: Tensor) -> None:
        self._steps: list[TierStep] = []
        start = 0
        for tier in tiers:
            rows = slice(start, start + len(tier.responses))
            longest, shortest = max(lengths[rows]), min(lengths[rows])
            self._steps.append(TierStep(tier, rows, positions[rows], longest, shortest < longest))
            start = rows.stop

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for step in self._steps:
            step.key_rows[layer].index_put_(step.place, k[step.rows])
            step.value_rows[layer].index_put_(step.place, v[step.rows])
            # The query heads that share a key-value head are the rows of one small matrix.
            queries, keys = q[step.rows].reshape(step.shape), step.keys[layer]
            scores = (
                torch.bmm(queries, keys) if step.mask is None else torch.baddbmm(step.mask, queries, keys)
            )
            outs.append(torch.bmm(torch.softmax(scores, -1), step.values[layer]))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.view(len(q), -1)


class PrefillAttention:
    """Whole contexts of any lengths, one after another without padding; keeps their keys and values.

    Args:
        lengths: of the contexts, in the order of the rows; equal ones that follow one another share a call.
    """

    def __init__(self, arch: Architecture, lengths: Sequence[int], device: torch.device, dtype: torch.dtype):
        self._runs = [(length, len(list(run))) for length, run in groupby(lengths) if length]
        self._lengths = list(lengths)
        shape = arch.num_layers, sum(lengths), arch.num_kv_heads, arch.head_dim
        self._keys = torch.empty(shape, device=device, dtype=dtype)
        self._values = torch.empty(shape, device=device, dtype=dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys[layer], self._values[layer] = k, v
        outs, start = [], 0
        for length, count in self._runs:
            rows = slice(start, start + length * count)
            # [count, heads, length, D]
            qs, ks, vs = (x[rows].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, scale=1.0, enable_gqa=True)
            outs.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
            start = rows.stop
        return torch.cat(outs)

    def blocks(self) -> list[Block]:
        """Of each context, in order: views."""
        keys, values = (torch.split(x, self._lengths, 1) for x in (self._keys, self._values))
        return [Block(k, v) for k, v in zip(keys, values, strict=True)]
