"""Sums over the samples of a packed [C] tensor, and the inverse."""

import torch
from torch import Tensor


def sums(values: Tensor, num_tokens: Tensor) -> Tensor:
    """Sum `values` [C] over the tokens of each sample: [N]."""
    samples = torch.arange(len(num_tokens), device=values.device).repeat_interleave(num_tokens)
    return torch.zeros(len(num_tokens), dtype=values.dtype, device=values.device).index_add(
        0, samples, values
    )


def spread(values: Tensor, num_tokens: Tensor) -> Tensor:
    """Repeat each sample's value, of `values` [N], for each of its tokens: [C]."""
    return values.repeat_interleave(num_tokens)
