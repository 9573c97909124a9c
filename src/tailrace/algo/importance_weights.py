"""Importance weights for tokens that another policy than the learning one generated."""

import torch
from torch import Tensor

from tailrace.algo.base import Correction
from tailrace.algo.segments import spread, sums


@torch.no_grad()
def importance_weights(
    logprobs: Tensor, behavior_logprobs: Tensor, num_tokens: Tensor, *, correction: Correction, cap: float
) -> Tensor:
    """Compute the factor of each token's loss. No gradient flows through it.

        w = pi / mu for each token
        none      1
        truncate  min(cap, w)                            PipelineRL 2 (later version), eq. 5; TIS
        mask      w, or 0 where w > cap
        sequence  min(cap, prod of the sample's w)       PipelineRL 2 (earlier version), eq. 5

    Args:
        logprobs: [C] under the policy pi that the loss assumes to have generated the tokens.
        behavior_logprobs: [C] under the policies mu that generated them.
        num_tokens: [N] completion tokens of each sample, none of them zero. Their sum is C.

    Returns:
        [C]
    """
    log_weights = logprobs - behavior_logprobs
    if correction == "none":
        return torch.ones_like(log_weights)
    if correction == "sequence":
        return spread(sums(log_weights, num_tokens).exp().clamp(max=cap), num_tokens)
    weights = log_weights.exp()
    if correction == "mask":
        return weights.where(weights <= cap, 0.0)
    return weights.clamp(max=cap)
