"""The reference model of one process: log-probs of finished samples, without training."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.types import SampleId


class TorchReference:
    """Computes with the trainer's packing, device and precision."""

    def __init__(self, policy: PolicyModel, max_tokens_per_microbatch: int) -> None:
        self._policy, self._max_tokens = policy, max_tokens_per_microbatch

    @classmethod
    def load(cls, path: Path, settings: TrainerSettings, *, temperature: float) -> "TorchReference":
        """Load the model of a Hugging Face folder. Raises as `PolicyModel.load`."""
        policy = PolicyModel.load(path, settings, temperature=temperature)
        return cls(policy, settings.max_tokens_per_microbatch)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """Compute the log-probs of each sample's completion tokens, in the order of the samples."""
        found: dict[SampleId, list[float]] = {}
        for batch in self._policy.micro_batches(samples, self._max_tokens):
            parts = torch.split(self._policy.logprobs(batch).logprobs, batch.num_tokens.tolist())
            found |= zip(batch.ids, (part.tolist() for part in parts), strict=True)
        return [found[sample.id] if sample.completion_ids else [] for sample in samples]
