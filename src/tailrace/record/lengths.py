"""The distribution of response lengths in five numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Lengths in tokens. Percentiles are nearest-rank: each is a length that occurred.

    Example:
        >>> LengthStats.of([4, 1, 3, 2])
        LengthStats(mean=2.5, p50=2, p90=4, p99=4, max=4)
    """

    mean: float
    p50: int
    p90: int
    p99: int
    max: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "LengthStats":
        """Of at least one length, in any order."""
        ordered = sorted(lengths)
        p50, p90, p99 = (ordered[-(-percent * len(ordered) // 100) - 1] for percent in (50, 90, 99))
        return cls(fmean(ordered), p50, p90, p99, ordered[-1])
