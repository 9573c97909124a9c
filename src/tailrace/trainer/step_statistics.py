"""Sums and counts from which the statistics of one optimizer step are computed."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tailrace.trainer.batch import TrainingSample
from tailrace.trainer.launch import Ranks
from tailrace.types import SampleId

N = TypeVar("N", Tensor, float)


class TokenSums(NamedTuple, Generic[N]):
    """Sums over the tokens of a micro-batch or of a step; scalars."""

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
    counted: N
    """Number of tokens that are not masked."""
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
        """Count the samples of a unit, including those with an empty completion."""
        self.samples += [sample.id for sample in unit]
        if self._ranks.rank == 0:  # all ranks of a replica are given the same units
            self._totals[NUM_SUMS] += len(unit)
            self._totals[NUM_SUMS + 1] += sum(len(sample.completion_ids) for sample in unit)

    def add_micro_batch(self, sums: TokenSums[Tensor]) -> None:
        self._totals[:NUM_SUMS] += torch.stack([value.double() for value in sums])
        self._totals[NUM_SUMS + 2] += 1

    def add_others(self) -> None:
        """Add the sums of all other processes. Samples and compute time stay those of this one."""
        self._ranks.sum_over_all(self._totals)

    def totals(self) -> StepTotals:
        """Read the totals from the device."""
        totals = self._totals.tolist()
        return StepTotals(TokenSums(*totals[:NUM_SUMS]), *map(int, totals[NUM_SUMS:]))
