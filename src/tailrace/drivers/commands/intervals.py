"""Means of held-out rewards, with intervals of 95%. Prompts are the units, not their samples.

Where all rewards are 0 or 1: Wilson's score interval (1927) of the mean of the prompts' shares, with as many
trials as prompts. The variance of the share of a prompt with several samples is at most p (1 - p) (Bhatia and
Davis, 2000), that of one sample, so the interval is not too narrow. Else: Student's t interval of the mean of
the prompts' means, clipped to [0, 1] if all rewards lie in it.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from math import inf, isfinite, pi, sqrt, tan
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from tailrace.record.figures import standard_deviation

Z = 1.96
"""The quantile of a normal distribution for a 95% interval."""


class Estimate(NamedTuple):
    """The mean reward of prompts. `interval`: of 95%; None: one prompt, or a reward that is not finite."""

    mean: float
    interval: tuple[float, float] | None
    num_prompts: int

    def __str__(self) -> str:
        if self.interval:
            return "95% interval {:.3f} to {:.3f}".format(*self.interval)
        return "one prompt: no interval" if self.num_prompts == 1 else "no interval"


def estimate_of(rewards: Sequence[Sequence[float]]) -> Estimate:
    """Return the estimate from the rewards of each prompt."""
    means, every = [fmean(each) for each in rewards], {reward for each in rewards for reward in each}
    mean, n = fmean(means), len(means)
    if n == 1 or not all(map(isfinite, every)):
        return Estimate(mean, None, n)
    if every <= {0.0, 1.0}:
        return Estimate(mean, wilson(mean, n), n)
    half, (least, most) = half_width(means), (0.0, 1.0) if 0 <= min(every) <= max(every) <= 1 else (-inf, inf)
    return Estimate(mean, (max(least, mean - half), min(most, mean + half)), n)


def recorded_estimate(samples: Path, round: float) -> Estimate | None:
    """Return that of the evaluation before a round, from the folder of samples of its run. None: it has none,
    or they are damaged."""
    try:
        lines = (samples / "eval" / f"round_{round:06.0f}.jsonl").read_bytes().splitlines()
        read = [msgspec.json.decode(line, type=_Line) for line in lines]
    except (OSError, ValueError, RecursionError):
        return None
    rewards = by_prompt((each.id.partition(".")[0], each.reward) for each in read)
    return estimate_of(rewards) if rewards else None


class _Line(msgspec.Struct):
    id: str
    reward: float


def by_prompt(samples: Iterable[tuple[object, float]]) -> list[list[float]]:
    """Return the rewards of each prompt, from the prompt and the reward of each sample."""
    rewards: dict[object, list[float]] = {}
    for prompt, reward in samples:
        rewards.setdefault(prompt, []).append(reward)
    return list(rewards.values())


def half_width(values: Sequence[float]) -> float:
    """Half of Student's 95% interval of a mean of at least two values."""
    return t_quantile(len(values) - 1) * standard_deviation(values) / sqrt(len(values))


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95% interval of a share of n."""
    middle, spread = share + Z**2 / (2 * n), Z * sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, (middle - spread) / (1 + Z**2 / n)), min(1.0, (middle + spread) / (1 + Z**2 / n))


@cache
def t_quantile(df: int) -> float:
    """The 97.5% quantile of Student's t: sqrt(df) tan(x), where x has the density cos(x)**(df - 1)."""
    edges = np.linspace(0.0, pi / 2, 2**16 + 1)
    within = np.cumsum(np.cos((edges[1:] + edges[:-1]) / 2) ** (df - 1))
    return sqrt(df) * tan(float(np.interp(0.95, within / within[-1], edges[1:])))
