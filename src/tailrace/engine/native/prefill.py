"""Whole contexts at once, by the model's own forward pass."""

from collections.abc import Sequence

import torch

from tailrace.engine.native.attention import PrefillAttention
from tailrace.engine.native.cache import Block
from tailrace.engine.native.model import Model


def prefill(model: Model, contexts: Sequence[Sequence[int]]) -> list[Block]:
    """Keys and values of contexts of any lengths, in their order."""
    # Equal lengths side by side share a call of attention.
    order = sorted(range(len(contexts)), key=lambda index: len(contexts[index]))
    lengths = [len(contexts[index]) for index in order]
    attention = PrefillAttention(model.architecture, lengths, model.device, model.dtype)
    if any(lengths):
        ids = torch.tensor([id for index in order for id in contexts[index]], device=model.device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(model.device)
        model.forward(ids, positions, attention)
    blocks = dict(zip(order, attention.blocks(), strict=True))
    return [blocks[index] for index in range(len(contexts))]
