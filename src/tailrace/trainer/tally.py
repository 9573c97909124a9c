"""What one optimizer step is made of, counted while it is accumulated."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tailrace.trainer.wire import TrainingSample
from tailrace.types import SampleId

N = TypeVar("N", Tensor, float)


class Sums(NamedTuple, Generic[N]):
    """Sums over the tokens of a micro-batch, scalars each; of a whole step once they are added up."""

    loss: N
    entropy: N
    clipped: N
    kl: N
    weights: N
    """Of w = pi/mu, unclamped."""
    squares: N
    """Of w^2."""
    counted: N
    """Tokens that are not left out."""
    reference_kl: N
    value_loss: N


class Totals(NamedTuple):
    """Of a step."""

    sums: Sums[float]
    num_samples: int
    num_tokens: int
    num_micro_batches: int


NUM_SUMS = len(Sums._fields)


class Tally:
    """Sums and counts of one step. They live on the device, so that adding to them waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.samples: list[SampleId] = []
        self.compute_s = 0.0
        self._totals = torch.zeros(NUM_SUMS + 3, dtype=torch.float64, device=device)
        """The sums, then the counts in the order of Totals."""

    def count(self, unit: Sequence[TrainingSample]) -> None:
        """Count the samples of a unit, those with an empty completion too."""
        self.samples += [sample.id for sample in unit]
        self._totals[NUM_SUMS] += len(unit)
        self._totals[NUM_SUMS + 1] += sum(len(sample.completion_ids) for sample in unit)

    def add(self, sums: Sums[Tensor]) -> None:
        """Add one micro-batch's."""
        self._totals[:NUM_SUMS] += torch.stack([value.double() for value in sums])
        self._totals[NUM_SUMS + 2] += 1

    def include(self, figures: Sequence[float]) -> None:
        """Add all that another process counted."""
        self._totals += torch.tensor(figures, dtype=torch.float64, device=self._totals.device)

    def figures(self) -> list[float]:
        """All that was counted, for another to include."""
        figures: list[float] = self._totals.tolist()
        return figures

    def all_reduce(self) -> None:
        """Make the sums those of all ranks."""
        dist.all_reduce(self._totals)

    def totals(self) -> Totals:
        totals = self.figures()
        return Totals(Sums(*totals[:NUM_SUMS]), *map(int, totals[NUM_SUMS:]))
