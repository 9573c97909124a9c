"""Mean and standard deviation that survive huge values: they never raise, and are NaN where the result is not
finite. JSON has no NaN; the files say null."""

import math
from collections.abc import Sequence
from statistics import fmean


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value.

    Example:
        >>> mean([1e308, 1e308, 1e308]) < 1.1e308
        True
    """
    try:
        result = fmean(values)
    except OverflowError:  # the sum overflows, the mean does not
        result = math.fsum(value / len(values) for value in values)
    except ValueError:  # infinities of both signs
        result = math.nan
    return result if math.isfinite(result) else math.nan


def standard_deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (divided by n - 1); 0 if all values are equal."""
    if len(set(values)) == 1:
        return 0.0
    centre = mean(values)
    # hypot scales its arguments: the squares of deviations above 1e154 would overflow.
    result = math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)
    return result if math.isfinite(result) else math.nan
