"""Forward and backward of samples in one process.

pack -> (values of the critic ->) log-probs -> weighted sum of token losses -> backward into the gradient sum

The loss is sum_t weight_t (importance_weight_t policy_loss_t + kl_coef kl_t); it is not divided by a count.
The importance weight multiplies the policy loss only, as in TRL.

Samples without a gradient (advantage zero, no critic, no KL in the loss) run forward only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.algo import losses
from tailrace.algo.base import AlgorithmSettings
from tailrace.algo.ess import weight_sums
from tailrace.algo.importance_weights import importance_weights
from tailrace.algo.kl import kl
from tailrace.algo.segments import spread, sums
from tailrace.trainer.batch import TrainingSample
from tailrace.trainer.critic import Critic, token_advantages
from tailrace.trainer.model import PolicyModel
from tailrace.trainer.old_policy import PublishedPolicy
from tailrace.trainer.packing import MicroBatch
from tailrace.trainer.step_statistics import TokenSums


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Adds gradients of samples to the `.grad` of policy and critic."""

    policy: PolicyModel
    critic: Critic | None
    """For advantages by gae."""
    published: PublishedPolicy | None
    """The old policy where it is recomputed; None: old log-probs are the recorded ones."""
    algorithm: AlgorithmSettings
    max_tokens_per_microbatch: int
    """Limit of input tokens."""
    max_completion_tokens: int
    """Length limit of a completion (Dr. GRPO divides by it)."""

    def run(self, samples: Sequence[TrainingSample], *, weights_published: bool) -> list[TokenSums[Tensor]]:
        """Add the gradients of samples to their sum.

        Args:
            weights_published: whether the current weights are those of the last publication.

        Returns:
            The statistics of each micro-batch of this rank.
        """
        statistics = []
        for with_gradient in (True, False):
            chosen = [sample for sample in samples if self._has_gradient(sample) is with_gradient]
            for batch in self.policy.own_micro_batches(chosen, self.max_tokens_per_microbatch):
                if batch.is_filler:
                    self._fill(batch, with_gradient)
                    continue
                with torch.set_grad_enabled(with_gradient):
                    loss, batch_sums = self._loss(batch, weights_published)
                if with_gradient:
                    loss.backward()  # type: ignore[no-untyped-call]
                statistics.append(batch_sums)
        return statistics

    def _fill(self, batch: MicroBatch, with_gradient: bool) -> None:
        """Make the passes of `run` with a gradient of zero, because other ranks make them."""
        with torch.set_grad_enabled(with_gradient):
            if self.critic:
                (self.critic.values(batch).sum() * 0).backward()  # type: ignore[no-untyped-call]
            if self.published:
                self.published.logprobs(batch)
            logprobs = self.policy.logprobs(batch).logprobs
        if with_gradient:
            (logprobs.sum() * 0).backward()  # type: ignore[no-untyped-call]

    def _has_gradient(self, sample: TrainingSample) -> bool:
        return sample.advantage != 0.0 or self.algorithm.learns_without_advantage

    def _loss(self, batch: MicroBatch, weights_published: bool) -> tuple[Tensor, TokenSums[Tensor]]:
        """The weighted sum of token losses, and the statistics."""
        settings = self.algorithm
        masked = batch.carried if settings.mask_carried else torch.zeros_like(batch.carried)
        counted = (~masked).float()
        weights = losses.token_weights(
            counted, batch.num_tokens, settings.normalize, max_completion_tokens=self.max_completion_tokens
        )
        advantages, critic_loss = self._advantages(batch, weights)
        old_logprobs = self.published.logprobs(batch) if self.published else batch.behavior_logprobs
        logprobs, entropy = self.policy.logprobs(batch)
        current = logprobs.detach()
        if old_logprobs is None:  # the current weights are the published ones
            old_logprobs = current
        per_token, clipped = self._policy_loss(batch, logprobs, old_logprobs, advantages)
        reference_kl = torch.zeros((), device=logprobs.device)
        if settings.needs_reference:
            estimates = kl(logprobs, batch.reference_logprobs, settings.kl_estimator)
            reference_kl = estimates.detach().sum()
            if settings.kl_bias_correction:
                estimates = estimates * (logprobs - old_logprobs).exp()
            if settings.kl_in == "loss":
                per_token = per_token + settings.kl_coef * estimates
        loss = (per_token * weights).sum()
        behavior_kl = kl(batch.behavior_logprobs, current, "k3")
        same_weights = _generated_by_published(batch) if weights_published else torch.zeros_like(masked)
        batch_sums = TokenSums(
            loss=loss.detach(),
            entropy=entropy.sum(),
            clipped=clipped.sum(),
            kl=behavior_kl.sum(),
            engine_mismatch_kl=behavior_kl.where(same_weights, 0.0).sum(),
            engine_mismatch_tokens=same_weights.sum(),
            **weight_sums(current, batch.behavior_logprobs)._asdict(),
            counted=counted.sum(),
            reference_kl=reference_kl,
            value_loss=critic_loss,
        )
        return loss, batch_sums

    def _policy_loss(
        self, batch: MicroBatch, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor
    ) -> losses.PolicyLoss:
        """The policy loss of each token times its importance weight, and whether it was clipped."""
        settings = self.algorithm
        low, high = settings.clip_low, settings.clip_high
        match settings.loss:
            case "grpo":
                loss = losses.grpo(logprobs, old_logprobs, advantages, clip_low=low, clip_high=high)
            case "gspo":
                loss = losses.gspo(
                    logprobs, old_logprobs, advantages, batch.num_tokens, clip_low=low, clip_high=high
                )
            case "cispo":
                loss = losses.cispo(logprobs, old_logprobs, advantages, clip_high=high)
            case "reinforce":
                loss = losses.reinforce(logprobs, advantages)
        weights = importance_weights(
            logprobs if settings.loss == "reinforce" else old_logprobs,
            batch.behavior_logprobs,
            batch.num_tokens,
            correction=settings.correction,
            cap=settings.correction_cap,
        )
        return loss._replace(per_token=loss.per_token * weights)

    def _advantages(self, batch: MicroBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The advantage of each token, [C], and the summed loss of the critic after its backward pass."""
        if self.critic is None:
            return spread(batch.advantages, batch.num_tokens), torch.zeros((), device=self.policy.device)
        values = self.critic.values(batch)
        advantages = token_advantages(values, batch, self.algorithm)
        loss = (losses.value_loss(values, advantages + values.detach()) * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return advantages, loss.detach()


def _generated_by_published(batch: MicroBatch) -> Tensor:
    """[C] bool: tokens of samples that the published weights generated from the first token on. A sample with
    carried tokens is excluded whole: its keys and values may be of older weights."""
    return spread(sums(batch.carried.float(), batch.num_tokens) == 0, batch.num_tokens)
