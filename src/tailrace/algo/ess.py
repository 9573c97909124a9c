"""The effective sample size: the share of a batch's tokens that the current policy can learn from."""

from typing import NamedTuple

from torch import Tensor

MAX_LOG_WEIGHT = 300.0
"""e^300 and its square fit a float64 with room for a sum. One token beyond it dominates the effective sample
size completely, so this bound does not change the result."""


class WeightSums(NamedTuple):
    """Sums over tokens of w = pi / mu; float64 scalars. Sums of the parts of a batch add up."""

    weights: Tensor
    """Sum of w."""
    squares: Tensor
    """Sum of w^2."""


def weight_sums(logprobs: Tensor, behavior_logprobs: Tensor) -> WeightSums:
    """Sum the unclamped weights w = pi / mu and their squares.

    Args:
        logprobs: [C] under the current policy pi.
        behavior_logprobs: [C] under the policies mu that generated the tokens.
    """
    log_weights = (logprobs - behavior_logprobs).double()
    weights = log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    return WeightSums(weights.sum(), (weights**2).sum())


def effective_sample_size(weights: float, squares: float, num_tokens: int) -> float:
    """(sum w)^2 / (N sum w^2) over N tokens, a share in (0, 1] (PipelineRL 5). It is 1 for no tokens.

    The weights are not clamped: clamped weights would hide the tokens that it is to detect.

    Example:
        >>> effective_sample_size(4.0, 10.0, num_tokens=2)
        0.8
    """
    return weights / squares * weights / num_tokens if num_tokens else 1.0
