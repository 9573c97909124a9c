"""Advantages: how much better a sample, or one of its tokens, did than expected."""

import math
from collections.abc import Sequence
from typing import Literal

EPSILON = 1e-4
"""Added to the standard deviation, as in TRL. A group of equal rewards has advantages of zero."""
LARGE = 1e150
"""Squares of larger rewards could overflow: they are scaled before."""


def group_advantages(rewards: Sequence[float], *, scale: Literal["group", "none", "rloo"]) -> list[float]:
    """Compute the advantages of the samples of one group.

    `group`: A_i = (r_i - mean(r)) / (std(r) + EPSILON)       GRPO, DeepSeekMath (2402.03300) 4.1.2
    `none`:  A_i = r_i - mean(r)                              Dr. GRPO (2503.20783) 3.2
    `rloo`:  A_i = r_i - mean of the others                   RLOO (2402.14740); K / (K - 1) times `none`

    std is the sample standard deviation (divided by K - 1), as in TRL. The advantage in a group of one
    sample is zero.

    Args:
        rewards: finite numbers.

    Returns:
        Advantages; infinite where `none` or `rloo` exceed the range of a float.

    Example:
        >>> group_advantages([1.0, 0.0, 0.0, 1.0], scale="none")
        [0.5, -0.5, -0.5, 0.5]
    """
    size = len(rewards)
    if size == 1:
        return [0.0]
    largest = max(map(abs, rewards))
    unit = math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest > LARGE else 1.0  # divides exactly
    scaled = [reward / unit for reward in rewards]
    mean = math.fsum(scaled) / size
    if scale == "none":
        return [(reward - mean) * unit for reward in scaled]
    if scale == "rloo":
        return [(reward - mean) * size / (size - 1) * unit for reward in scaled]
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scaled) / (size - 1))
    return [(reward - mean) / (deviation + EPSILON / unit) for reward in scaled]


def gae(values: Sequence[float], reward: float, *, gamma: float, gae_lambda: float) -> list[float]:
    """Compute generalised advantage estimates of the T tokens of one sample (1506.02438, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t,   r_t = 0 but for the last, r_{T-1} = reward,   V_T = 0
        A_t = delta_t + gamma lambda A_{t+1}

    With gamma = lambda = 1 this is reward - V_t, PipelineRL's eq. 4. The critic learns A + V. A sample that
    was cut off at the length limit counts as ended: no return is expected after it.

    Args:
        values: [T]: the critic's prediction before each token.

    Example:
        >>> gae([0.5, 0.25], 1.0, gamma=1.0, gae_lambda=1.0)
        [0.5, 0.75]
    """
    advantages: list[float] = []
    following, value_after = 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = (reward if t == len(values) - 1 else 0.0) + gamma * value_after - values[t]
        following = delta + gamma * gae_lambda * following
        value_after = values[t]
        advantages.append(following)
    return advantages[::-1]
