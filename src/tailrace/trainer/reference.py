"""The reference model of a rank: log-probs of finished samples, and no training."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.policy import DTYPES, Policy
from tailrace.trainer.wire import TrainingSample
from tailrace.types import SampleId


class TorchReference:
    """Computes as the trainer does: the same packing, device and precision."""

    def __init__(self, policy: Policy, token_budget: int) -> None:
        self._policy, self._token_budget = policy, token_budget

    @classmethod
    def from_pretrained(
        cls, path: Path, settings: TrainerSettings, *, temperature: float
    ) -> "TorchReference":
        """The frozen model of a Hugging Face folder.

        Raises:
            ConfigError: the architecture cannot run packed.
        """
        device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
        policy = Policy.load(path, temperature=temperature, device=device, dtype=dtype)
        return cls(policy, settings.token_budget)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """[num_tokens] of each sample, in the order of the samples."""
        found: dict[SampleId, list[float]] = {sample.id: [] for sample in samples}
        for batch in self._policy.batches(samples, self._token_budget):
            logprobs = self._policy.logprobs(batch).logprobs
            for sample, part in zip(batch.ids, torch.split(logprobs, batch.num_tokens.tolist()), strict=True):
                found[sample] = part.tolist()
        return [found[sample.id] for sample in samples]
