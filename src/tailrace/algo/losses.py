"""Policy-gradient losses: pure functions on the completion tokens of packed samples.

Every [C] tensor holds the C completion tokens of all samples, one sample after another. A loss gives a
value a token; `token_weights` says how values add up. What comes out is a SUM, divided once by the
count of a whole optimizer step, so it does not matter in how many pieces the step was computed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tailrace.algo.base import Normalize
from tailrace.algo.segments import spread, sums


class PolicyLoss(NamedTuple):
    per_token: Tensor
    """[C], differentiable."""
    clipped: Tensor
    """[C] bool: True where the clip removed the gradient, or for cispo bounded the weight."""


def grpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """The clipped surrogate, a token each (PPO, 1707.06347, eq. 7; DeepSeekMath, 2402.03300, eq. 3).

        rho = pi / pi_old
        loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    pi_old is never the moving weights: rho would be 1 and the clip dead. Unequal bounds are DAPO's
    (2503.14476, eq. 10).

    Args:
        logprobs, old_logprobs, advantages: [C]
    """
    return _surrogate((logprobs - old_logprobs).exp(), advantages, clip_low, clip_high)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    num_tokens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The clipped surrogate, with a ratio a sequence (GSPO, 2507.18071, eq. 5 and 7).

        s = (pi(y) / pi_old(y))^(1/|y|)
        loss = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), the same at each token of the sequence

    Under `sample_mean` a sequence's tokens add up to one such loss.

    Args:
        logprobs, old_logprobs, advantages: [C]; a sample's tokens share its advantage.
        num_tokens: [N], none of them zero.
    """
    means = sums(logprobs - old_logprobs, num_tokens) / num_tokens
    return _surrogate(spread(means.exp(), num_tokens), advantages, clip_low, clip_high)


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_high: float) -> PolicyLoss:
    """loss = -sg(min(rho, 1 + clip_high)) A log pi, a token each (CISPO, MiniMax-M1, 2506.13585, eq. 4-5).

    The weight is bounded and no token loses its gradient. There is no lower bound, as in the paper's runs.

    Args:
        logprobs, old_logprobs, advantages: [C]
    """
    ratio = (logprobs.detach() - old_logprobs).exp()
    return PolicyLoss(-ratio.clamp(max=1 + clip_high) * advantages * logprobs, ratio > 1 + clip_high)


def reinforce(logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """loss = -A log pi, a token each (Williams 1992, with the advantage for the reward).

    Args:
        logprobs, advantages: [C]
    """
    return PolicyLoss(-advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """[C]: (V - R)^2 / 2, a token each (PPO, 1707.06347, eq. 9; PipelineRL eq. 4).

    Without the clip of PPO's code: that bounds how far a critic moves over several passes through a batch,
    and here each sample is passed once.
    """
    return (values - returns).square() / 2


def token_weights(counted: Tensor, num_tokens: Tensor, normalize: Normalize, *, max_tokens: int) -> Tensor:
    """[C]: what each token's loss weighs in the sum.

    `sample_mean`: sum over samples of the mean over each one's tokens; the step divides by its samples.
    `token_mean`: sum over tokens; the step divides by its tokens (DAPO, 2503.14476, eq. 8).
    `sample_sum`: sum over tokens; the step divides by its samples (REINFORCE; RLOO, 2402.14740).
    `fixed_length`: that over `max_tokens`, the limit of a completion (Dr. GRPO, 2503.20783, 3.2 and its
    code).

    Args:
        counted: [C] float32: 1, or 0 for a token that is left out as if it were not there.
        num_tokens: [N] completion tokens of each sample, none of them zero; they sum to C.
    """
    match normalize:
        case "sample_mean":
            return counted / spread(sums(counted, num_tokens).clamp(min=1), num_tokens)
        case "fixed_length":
            return counted / max_tokens
        case "token_mean" | "sample_sum":
            return counted


def _surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return PolicyLoss(per_token, (too_high | too_low).detach())
