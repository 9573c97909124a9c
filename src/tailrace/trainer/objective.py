"""The loss of one micro-batch, as the algorithm's settings define it."""

from typing import NamedTuple

import torch
from torch import Tensor

from tailrace.algo import losses
from tailrace.algo.base import AlgorithmSettings
from tailrace.algo.importance_weights import importance_weights
from tailrace.algo.kl import kl
from tailrace.trainer.packing import MicroBatch


class Objective(NamedTuple):
    """Sums over a micro-batch. Only `loss` is differentiable."""

    loss: Tensor
    """Weighted sum of the policy loss, including the KL in the loss; not divided by a count."""
    clipped: Tensor
    """Number of clipped tokens."""
    reference_kl: Tensor
    """Sum of the KL estimates without coefficient; 0 without a reference."""


def objective(
    settings: AlgorithmSettings,
    batch: MicroBatch,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
) -> Objective:
    """sum_t weight_t (importance_weight_t policy_loss_t + kl_coef kl_t)

    The importance weight multiplies the policy loss only, as in TRL.

    Args:
        settings: the algorithm.
        batch: the micro-batch.
        logprobs: [C] under the current weights, differentiable.
        old_logprobs: [C] under the old policy.
        advantages: [C]
        weights: [C] weight of each token in the sum (`losses.token_weights`).
    """
    per_token, clipped = _policy_loss(settings, batch, logprobs, old_logprobs, advantages)
    numerator = logprobs if settings.loss == "reinforce" else old_logprobs
    per_token = per_token * importance_weights(
        numerator,
        batch.behavior_logprobs,
        batch.num_tokens,
        correction=settings.correction,
        cap=settings.correction_cap,
    )
    reference_kl = torch.zeros((), device=logprobs.device)
    if settings.needs_reference:
        estimates = kl(logprobs, batch.reference_logprobs, settings.kl_estimator)
        reference_kl = estimates.detach().sum()
        if settings.kl_bias_correction:
            estimates = estimates * (logprobs - old_logprobs).exp()
        if settings.kl_in == "loss":
            per_token = per_token + settings.kl_coef * estimates
    return Objective((per_token * weights).sum(), clipped.sum(), reference_kl)


def _policy_loss(
    settings: AlgorithmSettings, batch: MicroBatch, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor
) -> losses.PolicyLoss:
    low, high = settings.clip_low, settings.clip_high
    match settings.loss:
        case "grpo":
            return losses.grpo(logprobs, old_logprobs, advantages, clip_low=low, clip_high=high)
        case "gspo":
            return losses.gspo(
                logprobs, old_logprobs, advantages, batch.num_tokens, clip_low=low, clip_high=high
            )
        case "cispo":
            return losses.cispo(logprobs, old_logprobs, advantages, clip_high=high)
        case "reinforce":
            return losses.reinforce(logprobs, advantages)
