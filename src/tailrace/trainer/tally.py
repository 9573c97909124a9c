"""What one optimizer step is made of, counted while it is accumulated."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tailrace.trainer.wire import TrainSample
from tailrace.types import SampleId


class Totals(NamedTuple):
    """Sums over a step, in the order of the tally's vector."""

    loss: float
    entropy: float
    clipped: float
    kl: float
    num_samples: int
    num_tokens: int
    num_micro_batches: int


class Tally:
    """Sums and counts of one step. They live on the device, so that adding to them waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.samples: list[SampleId] = []
        self.compute_s = 0.0
        self._sums = torch.zeros(len(Totals._fields), dtype=torch.float64, device=device)

    def count(self, unit: Sequence[TrainSample]) -> None:
        """Count the samples of a unit, those with an empty completion too."""
        self.samples += [sample.id for sample in unit]
        self._sums[Totals._fields.index("num_samples")] += len(unit)
        self._sums[Totals._fields.index("num_tokens")] += sum(len(sample.completion_ids) for sample in unit)

    def add(self, *, loss: Tensor, entropy: Tensor, clipped: Tensor, kl: Tensor) -> None:
        """Add one micro-batch's sums, scalars each."""
        self._sums[:4] += torch.stack((loss, entropy, clipped.to(loss.dtype), kl))
        self._sums[-1] += 1

    def all_reduce(self) -> None:
        """Make the sums those of all ranks."""
        dist.all_reduce(self._sums)

    def totals(self) -> Totals:
        loss, entropy, clipped, kl, *counts = self._sums.tolist()
        return Totals(loss, entropy, clipped, kl, *map(int, counts))
