"""Intervals of 95%: Wilson's (1927, score interval) of a share, else that of a mean."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from tailrace.record.figures import standard_deviation

Z = 1.96
"""The quantile of a 95% interval."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of one value a prompt."""
    if set(values) <= {0.0, 1.0}:
        return wilson(fmean(values), len(values))
    half = half_width(values)
    return fmean(values) - half, fmean(values) + half


def half_width(values: Sequence[float]) -> float:
    """Half of the 95% interval of a mean."""
    return Z * standard_deviation(values) / sqrt(len(values))


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95% interval of a share of n."""
    middle, spread = share + Z**2 / (2 * n), Z * sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return (middle - spread) / (1 + Z**2 / n), (middle + spread) / (1 + Z**2 / n)
