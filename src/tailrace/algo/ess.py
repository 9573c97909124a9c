"""How much of a batch the current policy can still learn from."""

from typing import NamedTuple

from torch import Tensor

MAX_LOG_WEIGHT = 300.0
"""e^300 and its square fit a float64 with room for their sum. A token that far off is all there is to the
size, at this bound as beyond it; so nothing is clamped that could be seen."""


class WeightSums(NamedTuple):
    """Of w = pi/mu over tokens, float64 scalars: they add up over the pieces of a batch."""

    weights: Tensor
    squares: Tensor


def weight_sums(logprobs_T: Tensor, recorded_logprobs_T: Tensor) -> WeightSums:
    """Sums over tokens of the unclamped weights w = pi/mu and of their squares."""
    log_weights_T = (logprobs_T - recorded_logprobs_T).double()
    weights_T = log_weights_T.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    return WeightSums(weights_T.sum(), (weights_T**2).sum())


def effective_sample_size(weights: float, squares: float, num_tokens: int) -> float:
    """(sum w)^2 / (N sum w^2) over N tokens, a share in (0, 1] (PipelineRL 5). No tokens have 1.

    On unclamped weights: clamping first would hide what it is to show.

    Example:
        >>> effective_sample_size(4.0, 10.0, num_tokens=2)
        0.8
    """
    return weights / squares * weights / num_tokens if num_tokens else 1.0
