"""The distribution of response lengths in six numbers."""

from collections.abc import Sequence
from statistics import fmean

import msgspec


class LengthStats(msgspec.Struct, frozen=True):
    """Lengths in tokens. Percentiles are nearest-rank: each is a length that occurred.

    Example:
        >>> LengthStats.of([4, 1, 3, 2])
        LengthStats(mean=2.5, min=1, p50=2, p90=4, p99=4, max=4)
    """

    mean: float = msgspec.field(name="mean_length")
    min: int = msgspec.field(name="min_length")
    p50: int = msgspec.field(name="p50_length")
    p90: int = msgspec.field(name="p90_length")
    p99: int = msgspec.field(name="p99_length")
    max: int = msgspec.field(name="max_length")

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "LengthStats":
        """The statistics of at least one length, in any order."""
        ordered = sorted(lengths)
        p50, p90, p99 = (ordered[-(-percent * len(ordered) // 100) - 1] for percent in (50, 90, 99))
        return cls(fmean(ordered), ordered[0], p50, p90, p99, ordered[-1])
