"""Forward and backward of samples in one process.

pack -> (values of the critic ->) log-probs -> weighted sum of token losses -> backward into the gradient sum

The loss is sum_t weight_t (importance_weight_t policy_loss_t + kl_coef kl_t); it is not divided by a count.
The importance weight multiplies the policy loss only, as in TRL.

A masked token is context: it is in no loss, count or statistic. Advantages are those of the whole group, as
rewards are of whole responses. A sample with some tokens masked keeps its weight, which its other tokens
share (`losses.token_weights`). One with all of them masked is not computed, and the step divides by it too,
so that no other sample weighs more.

Samples without a gradient (advantage zero, no critic, no KL in the loss) run forward only.

The old policy pi_old of the probability ratio, recomputed by the trainer: `old_policy = "recomputed"`.

Recorded log-probs of a token belong to the weights that generated it. Recomputed log-probs of all tokens
belong to one policy, the one published last, also for tokens that older weights generated (APRIL's code).

Cost: none until the first optimizer step after a publication, because the current weights are the published
ones and the ratio is 1. After it, a copy of the published weights and one more forward pass for each
micro-batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.trainer import losses
from tailrace.drivers.trainer.batch import LossDatum, LossOutput, TokenLoss, TrainingSample
from tailrace.drivers.trainer.critic import Critic, token_advantages
from tailrace.drivers.trainer.distributed import Ranks, local
from tailrace.drivers.trainer.losses import importance_weights, kl, spread, token_loss, weight_sums
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.packing import MicroBatch
from tailrace.types import SampleId

N = TypeVar("N", Tensor, float)
TokenIds = tuple[int, ...]


class TokenSums(NamedTuple, Generic[N]):
    """Sums over the tokens in the loss of a micro-batch or of a step; scalars."""

    loss: N
    entropy: N
    clipped: N
    """Number of clipped tokens."""
    kl: N
    engine_mismatch_kl: N
    engine_mismatch_tokens: N
    """Number of tokens in the sum before."""
    weights: N
    """Sum of unclamped w = pi / mu."""
    squares: N
    """Sum of w^2."""
    reference_kl: N
    value_loss: N


NUM_SUMS = len(TokenSums._fields)


class StepTotals(NamedTuple):
    sums: TokenSums[float]
    num_samples: int
    num_tokens: int
    num_micro_batches: int


class StepStatistics:
    """Accumulates the sums of one step on the device, so that the host does not wait for them."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self._ranks = ranks
        self.samples: list[SampleId] = []
        self.compute_s = 0.0
        self._totals = torch.zeros(NUM_SUMS + 3, dtype=torch.float64, device=device)
        """The fields of TokenSums, then the counts of StepTotals."""

    def add_unit(self, unit: Sequence[TrainingSample]) -> None:
        """Count the samples of a unit, including those without a token in the loss."""
        self.samples += [sample.id for sample in unit]
        if self._ranks.rank == 0:  # all ranks of a replica are given the same units
            self._totals[NUM_SUMS] += len(unit)
            self._totals[NUM_SUMS + 1] += sum(sample.num_loss_tokens for sample in unit)

    def add_micro_batch(self, sums: TokenSums[Tensor]) -> None:
        if self._ranks.place_in_shard:  # all processes of a shard compute the same micro-batch
            return
        self._totals[:NUM_SUMS] += torch.stack([value.double() for value in sums])
        self._totals[NUM_SUMS + 2] += 1

    def add_others(self) -> None:
        """Add the sums of all other processes. Samples and compute time stay those of this one."""
        self._ranks.sum_over_all(self._totals)

    def totals(self) -> StepTotals:
        """Read the totals from the device."""
        totals = self._totals.tolist()
        return StepTotals(TokenSums(*totals[:NUM_SUMS]), *map(int, totals[NUM_SUMS:]))


class PublishedPolicy:
    """Computes log-probs under the weights of the last publication."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._weights: dict[str, Tensor] = {}
        """The published weights, or this rank's shards of them. Empty as long as they are the current
        ones."""

    def renew(self) -> None:
        """Declare the current weights the published ones."""
        self._weights = {}

    def keep(self) -> None:
        """Copy the published weights, if there is no copy yet. Called before each optimizer step."""
        if not self._weights:
            self._weights = {name: local(p).clone() for name, p in self._policy.parameters().items()}

    def copies(self) -> Iterable[Tensor]:
        """The published weights that are not the current ones."""
        return self._weights.values()

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor | None:
        """Compute log-probs under the published weights: [C]. None if these are the current weights."""
        if not self._weights:
            return None
        self._swap()
        try:
            return self._policy.logprobs(batch).logprobs
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange the contents of current and published weights, of one parameter at a time. Copies of
        offloaded weights to the device may still read them."""
        self._policy.synchronize()
        for name, parameter in self._policy.parameters().items():
            ours, kept = local(parameter), self._weights[name]
            current = ours.clone()
            ours.copy_(kept)
            kept.copy_(current)


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Adds gradients of samples to the `.grad` of policy and critic."""

    policy: PolicyModel
    critic: Critic | None
    """Critic for advantages by gae; None without."""
    published: PublishedPolicy | None
    """The old policy where it is recomputed; None: old log-probs are the recorded ones."""
    algorithm: AlgorithmSettings
    sampling: SamplingSettings
    """Dr. GRPO divides by the length limit."""

    def run(self, samples: Sequence[TrainingSample], *, weights_published: bool) -> list[TokenSums[Tensor]]:
        """Add the gradients of samples to their sum. Returns the statistics of each micro-batch of this rank.
        `weights_published`: the current weights are those of the last publication."""
        statistics = []
        learns = self.algorithm.learns_without_advantage
        for with_gradient in (True, False):
            chosen = [s for s in samples if (learns or s.advantage != 0.0) is with_gradient]
            for batch in self.policy.own_micro_batches(chosen):
                if batch.is_filler:
                    self._fill(batch, with_gradient)
                    continue
                with torch.set_grad_enabled(with_gradient):
                    loss, batch_sums = self._loss(batch, weights_published)
                if with_gradient:
                    loss.backward()  # type: ignore[no-untyped-call]
                statistics.append(batch_sums)
        return statistics

    def run_tokens(
        self, data: Sequence[LossDatum], loss: TokenLoss, *, with_gradient: bool, share_prompts: bool
    ) -> list[LossOutput]:
        """Compute a loss that is a sum over tokens, and add its gradients to their sum. Returns the outputs
        of the data that this rank computed.

        With `share_prompts` leading targets that are not in the loss are a prompt: the sequences of a
        micro-batch share it, and its log-probs are computed once. dro has a gradient there, and the ranks of
        a sharded model would not have the same prompts.
        """
        outputs: list[LossOutput] = []
        starts = [datum.num_leading if share_prompts and loss.name != "dro" else 0 for datum in data]
        samples = [datum.sample(number, starts[number]) for number, datum in enumerate(data)]
        prompts = self._prompt_logprobs({tuple(each.prompt_ids): each.prompt_ids for each in samples})
        for batch in self.policy.own_micro_batches(samples):
            if batch.is_filler:
                self._fill(batch, with_gradient)
                continue
            numbers = [id.prompt for id in batch.ids]
            advantages = [each for number in numbers for each in data[number].advantages[starts[number] :]]
            sampled = [each for number in numbers for each in data[number].sampled[starts[number] :]]
            with torch.set_grad_enabled(with_gradient):
                logprobs = self.policy.logprobs(batch).logprobs
                per_token = token_loss(
                    loss.name,
                    logprobs,
                    batch.behavior_logprobs,
                    torch.tensor(advantages, device=self.policy.device),
                    torch.tensor(sampled, device=self.policy.device) != 0,
                    batch.num_tokens,
                    clip_low=loss.clip_low,
                    clip_high=loss.clip_high,
                    beta=loss.beta,
                )
            if with_gradient:
                per_token.sum().backward()  # type: ignore[no-untyped-call]
            parts = (batch.by_sample(values) for values in (logprobs, per_token))
            for number, found, terms in zip(numbers, *parts, strict=True):
                before = prompts[tuple(samples[number].prompt_ids)]
                outputs.append(LossOutput(number, before + found, [0.0] * len(before) + terms))
        return outputs

    @torch.no_grad()
    def _prompt_logprobs(self, prompts: dict[TokenIds, list[int]]) -> dict[TokenIds, list[float]]:
        """The log-probs of each prompt's tokens from the second on."""
        keys, found = list(prompts), {key: list[float]() for key in prompts}
        samples = [LossDatum(ids, [0.0] * (len(ids) - 1)).sample(i) for i, ids in enumerate(prompts.values())]
        for batch in self.policy.own_micro_batches(samples):
            if not batch.is_filler:
                parts = batch.by_sample(self.policy.logprobs(batch).logprobs)
                found |= {keys[id.prompt]: part for id, part in zip(batch.ids, parts, strict=True)}
        return found

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

    def _loss(self, batch: MicroBatch, weights_published: bool) -> tuple[Tensor, TokenSums[Tensor]]:
        """The weighted sum of token losses, and the statistics."""
        settings = self.algorithm
        counted = (~batch.masked).float()
        limit = self.sampling.max_completion_tokens
        weights = losses.token_weights(counted, batch.num_tokens, settings.normalize, limit)
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
            reference_kl = (estimates.detach() * counted).sum()
            if settings.kl_bias_correction:
                estimates = estimates * (logprobs - old_logprobs).exp()
            if settings.kl_coef and settings.kl_in == "loss":
                per_token = per_token + settings.kl_coef * estimates
        loss = (per_token * weights).sum()
        behavior_kl = kl(batch.behavior_logprobs, current, "k3") * counted
        fresh = spread(~batch.carried, batch.num_tokens)  # others may have keys and values of older weights
        same_weights = fresh if weights_published else torch.zeros_like(fresh)
        batch_sums = TokenSums(
            loss=loss.detach(),
            entropy=(entropy * counted).sum(),
            clipped=(clipped & ~batch.masked).sum(),
            kl=behavior_kl.sum(),
            engine_mismatch_kl=behavior_kl.where(same_weights, 0.0).sum(),
            engine_mismatch_tokens=same_weights.sum(),
            **weight_sums(current, batch.behavior_logprobs, counted)._asdict(),
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
        sampled_from = logprobs if settings.loss == "reinforce" else old_logprobs
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
            sampled_from,
            batch.behavior_logprobs.where(~batch.masked, sampled_from.detach()),  # a masked one weighs 1
            batch.num_tokens,
            correction=settings.correction,
            cap=settings.correction_cap,
        )
        return loss._replace(per_token=loss.per_token * weights)

    def _advantages(self, batch: MicroBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The advantage of each token, [C], and the summed loss of the critic after its backward pass."""
        if self.critic is None:
            advantages = spread(batch.advantages, batch.num_tokens)
            if coef := self.algorithm.distill_coef:
                advantages = advantages + coef * (batch.reference_logprobs - batch.behavior_logprobs)
            return advantages, torch.zeros((), device=self.policy.device)
        values = self.critic.values(batch)
        advantages = token_advantages(values, batch, self.algorithm)
        loss = (losses.value_loss(values, advantages + values.detach()) * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return advantages, loss.detach()
