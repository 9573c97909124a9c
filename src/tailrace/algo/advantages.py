"""How much better a sample, or a token of it, did than was to be expected."""

import math
from collections.abc import Sequence
from typing import Literal

EPSILON = 1e-4
"""Keeps the quotient finite, as in TRL; a group of equal rewards has advantages of zero."""


def group_advantages(rewards: Sequence[float], *, scale: Literal["group", "none", "rloo"]) -> list[float]:
    """Advantages of the samples of one group.

    `group`: A_i = (r_i - mean(r)) / (std(r) + EPSILON)       GRPO, DeepSeekMath (2402.03300) 4.1.2
    `none`:  A_i = r_i - mean(r)                              Dr. GRPO (2503.20783) 3.2
    `rloo`:  A_i = r_i - mean of the others                   RLOO (2402.14740); K/(K-1) times `none`

    std is the sample standard deviation (divided by K - 1), as in TRL; a group of one sample has none
    and its advantage is zero.

    Example:
        >>> group_advantages([1.0, 0.0, 0.0, 1.0], scale="none")
        [0.5, -0.5, -0.5, 0.5]
    """
    size = len(rewards)
    mean = math.fsum(rewards) / size
    if size == 1:
        return [0.0]
    if scale == "none":
        return [reward - mean for reward in rewards]
    if scale == "rloo":
        return [(reward - mean) * size / (size - 1) for reward in rewards]
    divisor = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (size - 1)) + EPSILON
    return [(reward - mean) / divisor for reward in rewards]


def gae(values: Sequence[float], reward: float, *, gamma: float, gae_lambda: float) -> list[float]:
    """Generalised advantage estimates of one sample's T tokens (1506.02438, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t,   r_t = 0 but for the last, r_{T-1} = reward,   V_T = 0
        A_t = delta_t + gamma lambda A_{t+1}

    With gamma = lambda = 1 that is reward - V_t, PipelineRL's eq. 4. A + V is what the critic learns. A
    sample cut off at the length limit has ended, too: nothing is expected to come after it.

    Args:
        values: [T]: what the critic expects before each token.

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
