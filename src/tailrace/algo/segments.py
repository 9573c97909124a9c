"""Sums over the samples of a packed [C] tensor, and back."""

import torch
from torch import Tensor


def sums(values: Tensor, num_tokens: Tensor) -> Tensor:
    """[N]: of each sample's tokens, of `values` [C]."""
    samples = torch.arange(len(num_tokens), device=values.device).repeat_interleave(num_tokens)
    return torch.zeros(len(num_tokens), dtype=values.dtype, device=values.device).index_add(
        0, samples, values
    )


def spread(values: Tensor, num_tokens: Tensor) -> Tensor:
    """[C]: each sample's value, of `values` [N], at each of its tokens."""
    return values.repeat_interleave(num_tokens)
