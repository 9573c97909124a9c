"""Log-probs of completion tokens without holding all their logits.

The logits of C tokens are [C, V] and would exceed everything else in memory. They are computed for one chunk
of rows at a time, and computed again in the backward pass (activation checkpointing).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 26
"""Logits held at once: 256 MiB in float32."""


class TokenLogProbs(NamedTuple):
    """Log-probs and entropies of C tokens."""

    logprobs: Tensor
    """[C] float32, differentiable."""
    entropy: Tensor
    """[C] float32, not differentiable."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    dtype: torch.dtype = torch.float32,
) -> TokenLogProbs:
    """Compute log softmax((h W^T + b) / temperature) at the targets: the distribution that was sampled from.

    Args:
        hidden: [C, D] final hidden states at the positions that predict the targets.
        weight: [V, D] weight of the output embedding.
        bias: [V] or None.
        targets: [C]
        dtype: of the matrix products; the softmax is float32.
    """
    rows = max(1, CHUNK_ELEMENTS // len(weight))
    others = (weight, bias, temperature, dtype)
    if len(targets) <= rows:
        return TokenLogProbs(*_chunk(hidden, targets, *others))
    parts = [
        checkpoint(_chunk, *chunk, *others, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return TokenLogProbs(torch.cat(logprobs), torch.cat(entropies))


def _chunk(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, [rows] each."""
    with torch.autocast(hidden.device.type, dtype, enabled=dtype != torch.float32):
        logits = linear(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = logits.float() if bias is None else logits.float() + bias
        logp = (logits / temperature).log_softmax(-1)
        constant = logp.detach()
        entropy = -(constant.exp() * constant).sum(-1)
        return logp.gather(1, targets[:, None])[:, 0], entropy
