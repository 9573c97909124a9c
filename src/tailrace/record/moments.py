"""Statistics of rewards and lengths.

The mean and the standard deviation never raise on huge values. They are NaN where the result is not finite.
"""

import math
import statistics
from collections.abc import Sequence

import msgspec


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    result = statistics.mean(values)  # its sum does not overflow, unlike that of fmean
    return result if math.isfinite(result) else math.nan


def standard_deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (divided by n - 1); 0 if all values are equal."""
    if len(set(values)) == 1:
        return 0.0
    centre = mean(values)
    # hypot scales its arguments: the squares of deviations above 1e154 would overflow.
    result = math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)
    return result if math.isfinite(result) else math.nan


class LengthStats(msgspec.Struct, frozen=True):
    """Lengths in tokens. Percentiles are nearest-rank: each is a length that occurred."""

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
        return cls(statistics.fmean(ordered), ordered[0], p50, p90, p99, ordered[-1])
