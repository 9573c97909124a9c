"""Policy-gradient losses: pure functions on the completion tokens of packed samples.

A [C] tensor holds the C completion tokens of all samples, one sample after another: log-probs, advantages,
values, returns. `num_tokens` is [N]: the completion tokens of each sample, none of them zero. A loss is a
value for each token; `token_weights` gives the weights of their sum. The sum is divided once by the count of
the whole optimizer step, so the result does not depend on the number of micro-batches.

Beside the losses: importance weights for tokens that another policy generated, estimators of a KL divergence
from tokens that one of the two policies generated, and the effective sample size (ESS).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tailrace.algo.base import Correction, KLEstimator, Normalize, TokenLossName


def kl(logprobs: Tensor, other_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(p || q) at each token that p generated (Schulman 2020, "Approximating KL Divergence"): [C].

        r = q / p
        k1 = -log r             unbiased, of high variance; its own gradient is zero in expectation
        k2 = (log r)^2 / 2      biased, of low variance; its gradient is that of the KL
        k3 = (r - 1) - log r    unbiased and never negative (GRPO, DeepSeekMath, eq. 4)

    In a loss, k1 therefore has no effect on average. In the reward its gradient is the KL's
    (algo/advantages.py).

    Args:
        logprobs: [C] log p
        other_logprobs: [C] log q
    """
    log_ratio = other_logprobs - logprobs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return log_ratio.expm1() - log_ratio


MAX_LOG_WEIGHT = 300.0
"""e^300 and its square fit a float64 with room for a sum. One token beyond it dominates the effective sample
size completely, so this bound does not change the result."""


class WeightSums(NamedTuple):
    """Sums over tokens of w = pi / mu; float64 scalars. Sums of the parts of a batch add up."""

    weights: Tensor
    """Sum of w."""
    squares: Tensor
    """Sum of w^2."""


def weight_sums(logprobs: Tensor, behavior_logprobs: Tensor, counted: Tensor) -> WeightSums:
    """Sum the unclamped weights w = pi / mu and their squares.

    Args:
        logprobs: [C] under the current policy pi.
        behavior_logprobs: [C] under the policies mu that generated the tokens.
        counted: [C] float32: 1, or 0 for a token that is masked and not counted.
    """
    log_weights = (logprobs - behavior_logprobs).double()
    weights = log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp() * counted
    return WeightSums(weights.sum(), (weights**2).sum())


def effective_sample_size(weights: float, squares: float, num_tokens: int) -> float:
    """(sum w)^2 / (N sum w^2) over N tokens, a share in (0, 1] (PipelineRL 5). It is 1 for no tokens.

    The weights are not clamped: clamped weights would hide the tokens that it is to detect.

    Example:
        >>> effective_sample_size(4.0, 10.0, num_tokens=2)
        0.8
    """
    return weights / squares * weights / num_tokens if num_tokens else 1.0


def sums(values: Tensor, num_tokens: Tensor) -> Tensor:
    """Sum `values` [C] over the tokens of each sample: [N]."""
    samples = torch.arange(len(num_tokens), device=values.device).repeat_interleave(num_tokens)
    return torch.zeros(len(num_tokens), dtype=values.dtype, device=values.device).index_add(
        0, samples, values
    )


def spread(values: Tensor, num_tokens: Tensor) -> Tensor:
    """Repeat each sample's value, of `values` [N], for each of its tokens: [C]."""
    return values.repeat_interleave(num_tokens)


class PolicyLoss(NamedTuple):
    """The loss of each token."""

    per_token: Tensor
    """[C], differentiable."""
    clipped: Tensor
    """[C] bool: True where clipping removed the gradient, or for cispo bounded the weight."""


def grpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """The clipped surrogate with a ratio for each token (PPO, 1707.06347, eq. 7; GRPO, 2402.03300, eq. 3).

        rho = pi / pi_old
        loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    pi_old must not be the current weights after they have changed: rho would be 1, and clipping would have
    no effect. Unequal bounds are DAPO's (2503.14476, eq. 10).
    The bounds are distances from 1.
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
    """The clipped surrogate with a ratio for each sequence (GSPO, 2507.18071, eq. 5 and 7).

        s = (pi(y) / pi_old(y))^(1/|y|)
        loss = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), equal at each token of the sequence

    Under `sample_mean` the tokens of a sequence sum to one such loss. `advantages`: equal at all tokens of a
    sample."""
    means = sums(logprobs - old_logprobs, num_tokens) / num_tokens
    return _surrogate(spread(means.exp(), num_tokens), advantages, clip_low, clip_high)


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_high: float) -> PolicyLoss:
    """loss = -sg(min(rho, 1 + clip_high)) A log pi for each token (CISPO, MiniMax-M1, 2506.13585, eq. 4-5).

    The weight is bounded, and every token has a gradient. There is no lower bound, as in the paper's runs.
    """
    ratio = (logprobs.detach() - old_logprobs).exp()
    return PolicyLoss(-ratio.clamp(max=1 + clip_high) * advantages * logprobs, ratio > 1 + clip_high)


def reinforce(logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """loss = -A log pi for each token (Williams 1992, with the advantage in place of the reward)."""
    return PolicyLoss(-advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def token_loss(
    name: TokenLossName,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sampled: Tensor,
    num_tokens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
) -> Tensor:
    """Compute a loss of Tinker for each token: [C], differentiable. Tinker sums it over a batch.

        rho = pi / pi_old
        cross_entropy         -A log pi, with the weight of the token as A
        importance_sampling   -rho A
        ppo                   -min(rho A, clip(rho, clip_low, clip_high) A)
        cispo                 -sg(clip(rho, clip_low, clip_high)) A log pi
        dro                   -(A log pi - beta / 2 (log rho)^2)
        gspo                  -min(s A, clip(s, clip_low, clip_high) A) with
                              s = sg(e^mean(log rho)) pi / sg(pi), the mean over the sampled tokens of the
                              sequence: GSPO-token (2507.18071, eq. 13-14); with one advantage for all
                              tokens its gradient is that of `gspo`
        stable_reinforce      -sg(min(rho, clip_high)) A log pi + beta / 2 (log rho)^2 at sampled tokens: a
                              form of this project; Tinker's is not public

    Args:
        logprobs, old_logprobs, advantages: [C]
        sampled: [C] bool, of gspo and stable_reinforce; for gspo at least one of each sequence.
        num_tokens: [N] tokens of each sequence, none of them zero. Their sum is C.
        clip_low, clip_high: bounds of rho itself, not distances from 1.
    """
    match name:
        case "cross_entropy":
            return reinforce(logprobs, advantages).per_token
        case "importance_sampling":
            return -(logprobs - old_logprobs).exp() * advantages
        case "ppo":
            ratio = (logprobs - old_logprobs).exp()
            return _surrogate(ratio, advantages, 1 - clip_low, clip_high - 1).per_token
        case "cispo":
            ratio = (logprobs.detach() - old_logprobs).exp()
            return -ratio.clamp(clip_low, clip_high) * advantages * logprobs
        case "dro":
            return beta / 2 * (logprobs - old_logprobs).square() - advantages * logprobs
        case "gspo":
            current = logprobs.detach()
            means = sums((current - old_logprobs) * sampled, num_tokens) / sums(sampled.float(), num_tokens)
            ratio = (spread(means, num_tokens) + logprobs - current).exp()
            return _surrogate(ratio, advantages, 1 - clip_low, clip_high - 1).per_token
        case "stable_reinforce":
            weights = (logprobs.detach() - old_logprobs).exp().clamp(max=clip_high)
            penalty = beta * kl(logprobs, old_logprobs, "k2") * sampled
            return penalty - weights * advantages * logprobs


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """(V - R)^2 / 2 for each token (PPO, 1707.06347, eq. 9; PipelineRL eq. 4).

    Without the clipping of PPO's code, which bounds the change of the critic over several passes through a
    batch: here there is one pass.
    """
    return (values - returns).square() / 2


def token_weights(
    counted: Tensor, num_tokens: Tensor, normalize: Normalize, max_completion_tokens: int
) -> Tensor:
    """Compute the weight of each token's loss in the sum: [C].

    `sample_mean`: sum over samples of the mean over each sample's tokens; the step divides by its samples.
    `token_mean`: sum over tokens; the step divides by its tokens (DAPO, 2503.14476, eq. 8). `sample_sum`: sum
    over tokens; the step divides by its samples (REINFORCE; RLOO, 2402.14740). `fixed_length`: sample_sum
    divided by `max_completion_tokens` (Dr. GRPO, 2503.20783, 3.2 and its code). `counted`: [C] float32: 1, or
    0 for a token that is masked and not counted."""
    match normalize:
        case "sample_mean":
            return counted / spread(sums(counted, num_tokens).clamp(min=1), num_tokens)
        case "fixed_length":
            return counted / max_completion_tokens
        case "token_mean" | "sample_sum":
            return counted


def _surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return PolicyLoss(per_token, (too_high | too_low).detach())


@torch.no_grad()
def importance_weights(
    logprobs: Tensor, behavior_logprobs: Tensor, num_tokens: Tensor, *, correction: Correction, cap: float
) -> Tensor:
    """Compute the factor of each token's loss. No gradient flows through it.

        w = pi / mu for each token
        none      1
        truncate  min(cap, w)                            an interpretation of PipelineRL eq. 5; TIS
        mask      w, or 0 where w > cap
        sequence  min(cap, prod of the sample's w)       PipelineRL eq. 5 as both versions print it

    The later version prints the ratio of the sequence inside its sum over tokens. `truncate` reads it as that
    of each token.

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
