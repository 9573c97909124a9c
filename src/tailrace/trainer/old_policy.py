"""pi_old where it is recomputed: the policy as last published, while the optimizer moves on from it.

Recorded log-probs of a token are of the version that drew it. Recomputed ones are all of one policy: that
which is published, also for tokens carried over from older versions, as APRIL's code has it. Until the
first step after a publication these are the current weights, the ratio is 1, and nothing is computed; from
then on a copy of the published weights is kept, and a micro-batch costs one more forward pass.
"""

import torch
from torch import Tensor

from tailrace.trainer.packing import MicroBatch
from tailrace.trainer.policy import Policy


class PublishedPolicy:
    """The weights of the last publication."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights: dict[str, Tensor] = {}
        """Of the published policy; empty while the current ones are still they."""

    def publish(self) -> None:
        """The current weights are now the published ones."""
        self._weights = {}

    def keep(self) -> None:
        """Call before the weights move."""
        if not self._weights:
            self._weights = {name: p.detach().clone() for name, p in self._policy.parameters().items()}

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor | None:
        """[C]; None where they are those of the current weights."""
        if not self._weights:
            return None
        self._swap()
        try:
            return self._policy.logprobs(batch).logprobs
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._policy.parameters().items():
            parameter.data, self._weights[name] = self._weights[name], parameter.data
