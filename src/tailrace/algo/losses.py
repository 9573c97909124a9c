"""Policy-gradient losses: pure functions on the completion tokens of packed samples.

Every [C] tensor holds the C completion tokens of all samples, one sample after another. A loss gives a
value a token; `token_weights` says how values add up. What comes out is a SUM, divided once by the
count of a whole optimizer step, so it does not matter in how many pieces the step was computed.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Normalize = Literal["sample_mean", "token_mean"]


class PolicyLoss(NamedTuple):
    per_token: Tensor
    """[C], differentiable."""
    clipped: Tensor
    """[C] bool: True where the clip removed the gradient."""


def grpo(
    logprobs: Tensor, recorded_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """The clipped surrogate, a token each (DeepSeekMath, 2402.03300, eq. 3, without its KL term).

        rho = pi / pi_old
        loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    pi_old are the RECORDED log-probs, those of the policy that drew the token: recomputing them with
    the moving weights would make rho 1 and the clip dead. Unequal bounds are DAPO's (2503.14476, eq. 10).

    Args:
        logprobs, recorded_logprobs, advantages: [C]
    """
    ratio = (logprobs - recorded_logprobs).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return PolicyLoss(per_token, (too_high | too_low).detach())


def reinforce(logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """loss = -A log pi, a token each (Williams 1992, with the advantage for the reward).

    Args:
        logprobs, advantages: [C]
    """
    return PolicyLoss(-advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def token_weights(num_tokens: Tensor, normalize: Normalize) -> Tensor:
    """[C]: what each token's loss weighs in the sum.

    `sample_mean`: sum over samples of the mean over each one's tokens; the step divides by its samples.
    `token_mean`: sum over tokens; the step divides by its tokens (DAPO, 2503.14476, eq. 8).

    Args:
        num_tokens: [N] completion tokens of each sample, none of them zero; they sum to C.
    """
    weights = torch.ones_like(num_tokens, dtype=torch.float32)
    if normalize == "sample_mean":
        weights = weights / num_tokens
    return weights.repeat_interleave(num_tokens)


def kl_k3(logprobs: Tensor, recorded_logprobs: Tensor) -> Tensor:
    """[C]: an unbiased estimate of KL(recorded || current) from tokens drawn by the recorded policy.

        k3 = (rho - 1) - log rho,   rho = pi / pi_recorded        (Schulman 2020, "Approximating KL")

    Never negative, and of low variance. Args as for `grpo`.
    """
    log_ratio = logprobs - recorded_logprobs
    return log_ratio.expm1() - log_ratio
