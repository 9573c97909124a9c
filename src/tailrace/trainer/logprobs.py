"""Log-probs of completion tokens, without ever holding all their logits.

Logits are [C, V] and would dwarf everything else in memory. Here they exist for one chunk of rows at a
time: the forward keeps one number a token, and the backward computes each chunk's logits again.

    z = (h W^T + b) / temperature        the distribution the engine drew from
    log p(y) = z_y - logsumexp(z)        d log p(y) / dz = onehot(y) - softmax(z)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 23
"""Logits held at once: 32 MiB in float32."""


class TokenLogProbs(NamedTuple):
    logprobs: Tensor
    """[C] float32, differentiable."""
    entropy: Tensor
    """[C] float32, a statistic: no gradient flows through it."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    dtype: torch.dtype = torch.float32,
) -> TokenLogProbs:
    """Log-probs of `targets` under the head's distribution at `temperature`.

    Args:
        hidden: [C, D] final hidden states, each at the place that predicts its target.
        weight: [V, D] of the output embedding.
        bias: [V] or None.
        targets: [C]
        dtype: of the matrix products; the softmax is always float32.
    """
    return TokenLogProbs(*_TokenLogProbs.apply(hidden, weight, bias, targets, temperature, dtype))  # type: ignore[no-untyped-call]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature, ctx.dtype = temperature, dtype
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        cast_weight = weight.to(dtype)
        for rows in _chunks(len(targets), len(weight)):
            logp = _logits(hidden[rows].to(dtype), cast_weight, bias, temperature).log_softmax(-1)
            logprobs[rows] = logp.gather(1, targets[rows, None])[:, 0]
            entropy[rows] = -(logp.exp() * logp).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        dtype, grad = ctx.dtype, grads[0] / ctx.temperature
        cast_weight = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for rows in _chunks(len(targets), len(weight)):
            chunk = hidden[rows].to(dtype)
            grad_logits = _logits(chunk, cast_weight, bias, ctx.temperature).softmax(-1)
            grad_logits.mul_(-grad[rows, None])
            grad_logits.scatter_add_(1, targets[rows, None], grad[rows, None])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(dtype)
            grad_hidden[rows] = (grad_logits @ cast_weight).to(hidden.dtype)
            grad_weight += grad_logits.T @ chunk
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[rows, V] float32"""
    logits = (hidden @ weight.T).float()
    if bias is not None:
        logits += bias
    return logits.div_(temperature)


def _chunks(num_rows: int, num_columns: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // num_columns)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
