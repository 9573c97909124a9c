"""Penalties that are subtracted from a sample's reward before advantages are computed."""

import math
from collections.abc import Sequence

from tailrace.algo.base import KLEstimator

MAX_LOG_RATIO = 700.0
"""exp of it is near the largest float."""


def overlong_penalty(num_tokens: int, *, max_completion_tokens: int, buffer: float, penalty: float) -> float:
    """Compute the soft overlong punishment (DAPO, 2503.14476, eq. 13; PipelineRL 5), to be subtracted.

    It is zero up to (1 - buffer) max_completion_tokens, then rises linearly to `penalty` at
    max_completion_tokens.

    Args:
        num_tokens: completion tokens of the sample.
        max_completion_tokens: length limit.
        buffer: share of the limit.
        penalty: at the limit.

    Example:
        >>> [overlong_penalty(n, max_completion_tokens=100, buffer=0.2, penalty=1.0) for n in (80, 90, 100)]
        [0.0, 0.5, 1.0]
    """
    width = buffer * max_completion_tokens
    excess = num_tokens - (max_completion_tokens - width)
    return penalty * min(1.0, excess / width) if excess > 0 and width > 0 else 0.0


def kl_penalty(
    logprobs: Sequence[float], reference_logprobs: Sequence[float], estimator: KLEstimator
) -> float:
    """Sum the estimates of KL(policy || reference) over a sample's tokens (`algo/kl.py` for each token).

    k1 is log pi(y) - log pi_ref(y), the penalty of RLHF (2203.02155, eq. 2). Of the three, only k1 in the
    reward gives the gradient of the KL under policy gradients.

    Args:
        logprobs: [num_tokens] under the policy that generated the tokens.
        reference_logprobs: [num_tokens]
        estimator: k1, k2 or k3.
    """
    log_ratios = [q - p for p, q in zip(logprobs, reference_logprobs, strict=True)]
    match estimator:
        case "k1":
            return -math.fsum(log_ratios)
        case "k2":
            return math.fsum(x * x / 2 for x in log_ratios)
        case "k3":
            return math.fsum(math.expm1(min(x, MAX_LOG_RATIO)) - x for x in log_ratios)
