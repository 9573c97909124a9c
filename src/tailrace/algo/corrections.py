"""Weights for tokens that another policy drew than the one that learns from them."""

import torch
from torch import Tensor

from tailrace.algo.base import Correction
from tailrace.algo.segments import spread, sums


@torch.no_grad()
def importance_weights(
    logprobs: Tensor, recorded_logprobs: Tensor, num_tokens: Tensor, *, correction: Correction, cap: float
) -> Tensor:
    """[C]: what each token's loss is multiplied by; no gradient flows through it.

        w = pi / mu, a token each
        none      1
        truncate  min(cap, w)                            PipelineRL 2 (later version), eq. 5; TIS
        mask      w, or 0 where w > cap                  a token too far off teaches nothing
        sequence  min(cap, prod of the sample's w)       PipelineRL 2 (earlier version), eq. 5

    Args:
        logprobs: [C] under the policy that the loss takes the tokens to be drawn by.
        recorded_logprobs: [C] under those that drew them.
        num_tokens: [N], none of them zero; they sum to C.
    """
    log_weights = logprobs - recorded_logprobs
    if correction == "none":
        return torch.ones_like(log_weights)
    if correction == "sequence":
        return spread(sums(log_weights, num_tokens).exp().clamp(max=cap), num_tokens)
    weights = log_weights.exp()
    if correction == "mask":
        return weights.where(weights <= cap, 0.0)
    return weights.clamp(max=cap)
