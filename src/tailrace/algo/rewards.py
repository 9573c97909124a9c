"""What is taken from a sample's reward before advantages are made of it."""

import math
from collections.abc import Sequence

from tailrace.algo.base import KLEstimator


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: float, penalty: float) -> float:
    """The soft overlong punishment (DAPO, 2503.14476, eq. 13; PipelineRL 5), as a number to subtract.

    Nothing up to (1 - buffer) max_tokens, then rising linearly to `penalty` at max_tokens.

    Example:
        >>> [overlong_penalty(n, max_tokens=100, buffer=0.2, penalty=1.0) for n in (80, 90, 100)]
        [0.0, 0.5, 1.0]
    """
    room = buffer * max_tokens
    over = num_tokens - (max_tokens - room)
    return penalty * min(1.0, over / room) if over > 0 and room > 0 else 0.0


def kl_penalty(
    logprobs: Sequence[float], reference_logprobs: Sequence[float], estimator: KLEstimator
) -> float:
    """Sum over a sample's tokens of the estimate of KL(policy || reference), as `kl.kl` has it a token.

    k1 is log pi(y) - log pi_ref(y), the penalty of RLHF (2203.02155, eq. 2); under policy gradients it alone
    gives the gradient of the KL.

    Args:
        logprobs: [num_tokens] as recorded.
        reference_logprobs: [num_tokens]
    """
    log_ratios = [q - p for p, q in zip(logprobs, reference_logprobs, strict=True)]
    match estimator:
        case "k1":
            return -math.fsum(log_ratios)
        case "k2":
            return math.fsum(x * x / 2 for x in log_ratios)
        case "k3":
            return math.fsum(math.expm1(x) - x for x in log_ratios)
