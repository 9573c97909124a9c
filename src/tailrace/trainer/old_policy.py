"""The old policy pi_old of the probability ratio, recomputed by the trainer: `old_policy = "recomputed"`.

Recorded log-probs of a token belong to the weights that generated it. Recomputed log-probs of all tokens
belong to one policy, the one published last, also for tokens that older weights generated (APRIL's code).

Cost: none until the first optimizer step after a publication, because the current weights are the published
ones and the ratio is 1. After it, a copy of the published weights and one more forward pass for each
micro-batch.
"""

import torch
from torch import Tensor

from tailrace.trainer.fsdp import local
from tailrace.trainer.model import PolicyModel
from tailrace.trainer.packing import MicroBatch


class PublishedPolicy:
    """Computes log-probs under the weights of the last publication."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._weights: dict[str, Tensor] = {}
        """The published weights. If the model is sharded, this rank's shards. Empty as long as they are the
        current ones."""

    def publish(self) -> None:
        """Declare the current weights the published ones."""
        self._weights = {}

    def keep(self) -> None:
        """Copy the published weights, if there is no copy yet. Called before each optimizer step."""
        if not self._weights:
            self._weights = {name: local(p).clone() for name, p in self._policy.parameters().items()}

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
