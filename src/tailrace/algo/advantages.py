"""How much better a sample did than the others of its group."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

EPSILON = 1e-4
"""Keeps the quotient finite, as in TRL; a group of equal rewards has advantages of zero."""


def group_advantages(rewards: Sequence[float], *, scale: Literal["group", "none"]) -> list[float]:
    """Advantages of the samples of one group.

    `group`: A_i = (r_i - mean(r)) / (std(r) + EPSILON)       GRPO, DeepSeekMath (2402.03300) 4.1.2
    `none`:  A_i = r_i - mean(r)                              Dr. GRPO (2503.20783) 3.2

    std is the sample standard deviation (divided by K - 1), as in TRL; a group of one sample has none
    and its advantage is zero.

    Example:
        >>> group_advantages([1.0, 0.0, 0.0, 1.0], scale="none")
        [0.5, -0.5, -0.5, 0.5]
    """
    mean = math.fsum(rewards) / len(rewards)
    if scale == "none" or len(rewards) == 1:
        return [reward - mean for reward in rewards]
    divisor = statistics.stdev(rewards) + EPSILON
    return [(reward - mean) / divisor for reward in rewards]
