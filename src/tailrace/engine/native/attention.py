"""Attention of decode steps and of prefills, called once a layer by the model.

Suffixes: H query heads, K key-value heads, D head dimension; others as in cache.py.
"""

from collections import abc

import torch
from torch import Tensor
from torch.nn import functional as F

from tailrace.devices import for_fused_attention
from tailrace.engine.native.cache import Tier
from tailrace.engine.native.sequence import Block


class _TierStep:
    """One tier in one decode step.

    Args:
        rows: of the batch: the tier's sequences in the order of their slots.
        lengths: tokens of these sequences.
        positions: [n], where each slot is written.
    """

    def __init__(self, tier: Tier, rows: slice, lengths: abc.Sequence[int], positions: Tensor) -> None:
        self.rows, self._tier, self._longest = rows, tier, max(lengths)
        self._slots, self._positions = torch.arange(len(lengths), device=positions.device), positions
        self._mask: Tensor | None = None
        if min(lengths) < self._longest:
            beyond = torch.arange(self._longest, device=positions.device) > positions[:, None, None, None]
            zeros = tier.pieces[0].new_zeros(beyond.shape)
            self._mask = zeros.masked_fill_(beyond, float("-inf"))  # [n, 1, 1, longest]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._tier.pieces[2 * layer : 2 * layer + 2]
        keys[self._slots, :, self._positions] = k
        values[self._slots, :, self._positions] = v
        # The query heads that share a key-value head are passed as several queries of one head.
        num, num_kv, dim = k.shape
        keys, values = keys[:num, :, : self._longest], values[:num, :, : self._longest]
        out = F.scaled_dot_product_attention(q.view(num, num_kv, -1, dim), keys, values, self._mask)
        return out.reshape(num, -1)


class DecodeAttention:
    """One new position for every running sequence.

    Args:
        tiers: those with sequences.
        lengths: tokens of each sequence, by tier and slot.
        positions: [T], the lengths minus one.
    """

    def __init__(self, tiers: abc.Sequence[Tier], lengths: abc.Sequence[int], positions: Tensor) -> None:
        self._steps: list[_TierStep] = []
        start = 0
        for tier in tiers:
            rows = slice(start, start + len(tier.sequences))
            self._steps.append(_TierStep(tier, rows, lengths[rows], positions[rows]))
            start = rows.stop

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = [step.attend(layer, q[step.rows], k[step.rows], v[step.rows]) for step in self._steps]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class PrefillAttention:
    """Causal attention of whole contexts, one after another without padding. Keeps their keys and values.

    Args:
        lengths: of the contexts, in the order of the rows.
    """

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._pieces: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pieces += k.clone(), v.clone()  # views of tensors that hold the queries, too
        # Of all contexts [1, heads, T, D].
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        parts = (x.split_with_sizes(self._lengths, 2) for x in (q, *for_fused_attention(q, k, v)))
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
            for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat(outs, 1).transpose(0, 1).flatten(1)

    def blocks(self) -> list[Block]:
        """Views of the keys and values of each context, in order."""
        pieces = (piece.transpose(0, 1).split_with_sizes(self._lengths, 1) for piece in self._pieces)
        return [list(block) for block in zip(*pieces, strict=True)]
