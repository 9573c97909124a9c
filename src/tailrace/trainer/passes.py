"""Passes: forward and backward of samples in one process, into its sum of gradients.

pack -> (values ->) log-probs -> loss summed with its weights -> backward into the sum
(forward only, where the advantage is zero and nothing else has a gradient)
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tailrace.algo.base import AlgorithmSettings
from tailrace.algo.ess import weight_sums
from tailrace.algo.kl import kl
from tailrace.algo.losses import token_weights, value_loss
from tailrace.algo.segments import spread
from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.critic import Critic, token_advantages
from tailrace.trainer.objective import objective
from tailrace.trainer.old_policy import PublishedPolicy
from tailrace.trainer.packing import MicroBatch, fed_tokens
from tailrace.trainer.policy import DTYPES, Policy
from tailrace.trainer.tally import Sums
from tailrace.trainer.wire import TrainingSample

BOTH_WAYS = 2.5
"""What forward and backward cost, the forward pass alone being one; by operations it would be 3."""


class Passes:
    """The model, and the critic that the algorithm may want. Gradients are added to their `.grad`."""

    def __init__(
        self,
        policy: Policy,
        critic: Critic | None,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        *,
        max_tokens: int,
        source: Path,
    ) -> None:
        self.policy, self.critic = policy, critic
        self.settings, self.algorithm = settings, algorithm
        self.source = source
        """The folder that the model was loaded from."""
        self.published = PublishedPolicy(policy) if algorithm.old_policy == "recomputed" else None
        self._max_tokens = max_tokens

    @classmethod
    def load(
        cls,
        path: Path,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        *,
        temperature: float,
        max_tokens: int,
    ) -> "Passes":
        """The model in a Hugging Face folder, and the critic that the algorithm may want.

        Args:
            temperature: of sampling: log-probs are of the distribution the tokens were drawn from.
            max_tokens: the limit of a completion.

        Raises:
            ConfigError: the architecture cannot run packed.
        """
        device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
        policy = Policy.load(path, temperature=temperature, device=device, dtype=dtype)
        critic = Critic.load(path, settings, dtype) if algorithm.advantage == "gae" else None
        return cls(policy, critic, settings, algorithm, max_tokens=max_tokens, source=path)

    def teaches(self, sample: TrainingSample) -> bool:
        """Whether it has a gradient; of all others the statistics are all that is computed."""
        return sample.advantage != 0.0 or self.algorithm.learns_without_advantage

    def cost(self, sample: TrainingSample) -> float:
        """In tokens of a forward pass without attention, which costs a long sample as much again."""
        num_tokens = fed_tokens([sample])
        ways = BOTH_WAYS if self.teaches(sample) else 1.0
        return num_tokens * (1 + num_tokens * self.policy.attention_cost) * ways

    def run(self, samples: Sequence[TrainingSample]) -> list[Sums[Tensor]]:
        """Add the samples' gradients to the sum. Returns the statistics of each micro-batch."""
        taught = [sample for sample in samples if self.teaches(sample)]
        others = [sample for sample in samples if not self.teaches(sample)]
        learned = [self._learn(batch) for batch in self._batches(taught)]
        return [*learned, *(self._measure(batch) for batch in self._batches(others))]

    def _batches(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        return self.policy.batches(samples, self.settings.token_budget)

    def _learn(self, batch: MicroBatch) -> Sums[Tensor]:
        loss, sums = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return sums

    @torch.no_grad()
    def _measure(self, batch: MicroBatch) -> Sums[Tensor]:
        return self._loss(batch)[1]

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, Sums[Tensor]]:
        """Summed with its weights, and its statistics."""
        left_out = batch.carried if self.algorithm.mask_carried else torch.zeros_like(batch.carried)
        counted = (~left_out).float()
        normalize = self.algorithm.normalize
        weights = token_weights(counted, batch.num_tokens, normalize, max_tokens=self._max_tokens)
        advantages, critic_loss = self._judge(batch, weights)
        old_logprobs = self.published.logprobs(batch) if self.published else batch.recorded_logprobs
        logprobs, entropy = self.policy.logprobs(batch)
        current = logprobs.detach()
        if old_logprobs is None:  # the current weights are the published ones
            old_logprobs = current
        loss, clipped, reference_kl = objective(
            self.algorithm, batch, logprobs, old_logprobs, advantages, weights
        )
        sums = Sums(
            loss=loss.detach(),
            entropy=entropy.sum(),
            clipped=clipped.sum(),
            kl=kl(batch.recorded_logprobs, current, "k3").sum(),
            **weight_sums(current, batch.recorded_logprobs)._asdict(),
            counted=counted.sum(),
            reference_kl=reference_kl,
            value_loss=critic_loss,
        )
        return loss, sums

    def _judge(self, batch: MicroBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The advantage of each token, [C], and the critic's summed loss, its gradient being taken."""
        if self.critic is None:
            return spread(batch.advantages, batch.num_tokens), torch.zeros((), device=self.policy.device)
        values = self.critic.values(batch)
        advantages = token_advantages(values, batch, self.algorithm)
        loss = (value_loss(values, advantages + values.detach()) * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return advantages, loss.detach()
