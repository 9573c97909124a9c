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
    """What one decode step needs to know of a tier. Rows of the batch are its slots, from `start`."""

    def __init__(self, tier: Tier, start: int, positions: Tensor, longest: int, ragged: bool) -> None:
        """`positions`: [n], where each slot writes; the longest response then has `longest` positions."""
        self.tier = tier
        self.rows = slice(start, start + len(tier.responses))
        self.slots = torch.arange(len(tier.responses), device=positions.device)
        self.positions = positions[self.rows]
        self.longest = longest
        self.mask = self._mask() if ragged else None

    def _mask(self) -> Tensor:
        """[n * K, 1, longest]: -inf beyond each response's length."""
        reach = torch.arange(self.longest, device=self.positions.device)
        keys = self.tier.keys
        mask = keys.new_zeros(len(self.slots), 1, 1, self.longest)
        mask.masked_fill_((reach > self.positions[:, None])[:, None, None], float("-inf"))
        return mask.expand(-1, keys.shape[2], 1, -1).reshape(-1, 1, self.longest)


class DecodeAttention:
    """One new position for every running response."""

    def __init__(self, arch: Architecture, tiers: Sequence[Tier], lengths: Sequence[int], positions: Tensor):
        """`lengths`: tokens of each response, in the order of the rows; `positions`: those minus one."""
        self._scale = arch.head_dim**-0.5
        self._unmasked = torch.empty((), device=positions.device, dtype=tiers[0].keys.dtype)
        self._steps: list[TierStep] = []
        start = 0
        for tier in tiers:
            stop = start + len(tier.responses)
            longest, shortest = max(lengths[start:stop]), min(lengths[start:stop])
            self._steps.append(TierStep(tier, start, positions, longest, shortest < longest))
            start = stop

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        for step in self._steps:
            tier, rows = step.tier, step.rows
            place = step.slots, step.positions
            tier.key_rows[layer].index_put_(place, k[rows])
            tier.value_rows[layer].index_put_(place, v[rows])
            num_matrices = len(step.slots) * k.shape[1]
            keys = tier.key_matrices[layer][:num_matrices, :, : step.longest]
            values = tier.value_matrices[layer][:num_matrices, : step.longest]
            # The query heads that share a key-value head are the rows of one small matrix.
            queries = q[rows].reshape(num_matrices, -1, q.shape[-1])
            mask, beta = (self._unmasked, 0) if step.mask is None else (step.mask, 1)
            scores = torch.baddbmm(mask, queries, keys, beta=beta, alpha=self._scale)
            torch.bmm(torch.softmax(scores, -1), values, out=out[rows].view(queries.shape))
        return out.flatten(1)


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
            out = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
            outs.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
            start = rows.stop
        return torch.cat(outs)

    def blocks(self) -> list[Block]:
        """Of each context, in order: views."""
        keys, values = (torch.split(x, self._lengths, 1) for x in (self._keys, self._values))
        return [Block(k, v) for k, v in zip(keys, values, strict=True)]
