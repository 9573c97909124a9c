"""How much of a batch the current policy can still learn from."""

import torch
from torch import Tensor


def effective_sample_size(logprobs_T: Tensor, recorded_logprobs_T: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) over tokens, w = pi/mu, a share in (0, 1] (PipelineRL 5).

    On unclamped weights: clamping first would hide what it is to show. Computed relative to the largest
    weight, so that it neither overflows nor depends on a common factor. An empty batch has 1.

    Example:
        >>> effective_sample_size(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]))
        1.0
    """
    if logprobs_T.numel() == 0:
        return 1.0
    log_weights_T = (logprobs_T - recorded_logprobs_T).double()
    weights_T = torch.exp(log_weights_T - log_weights_T.max())
    return float(weights_T.sum() ** 2 / (weights_T.numel() * (weights_T**2).sum()))
