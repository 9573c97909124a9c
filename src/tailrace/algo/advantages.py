"""Advantages: how much better a sample, or one of its tokens, did than expected.

From the rewards of a complete group to the advantages of its samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tailrace.algo.base import AlgorithmSettings, KLEstimator
from tailrace.contracts.sampling import SamplingSettings
from tailrace.types import Group, Sample

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


MAX_ADVANTAGE = 1e15
"""The square of a larger gradient could exceed float32, and its norm would not be finite."""
MAX_LOG_RATIO = 700.0
"""exp of it is near the largest float."""


@dataclass(frozen=True, slots=True)
class ComputeAdvantages:
    """Sets the advantages of a complete group, or returns the reason why it must not be trained.

    `Sample.reward` stays the reward of the task; penalties are in the advantage only. The filter compares
    rewards of the task, too: penalties depend on lengths, which nearly always differ.
    """

    settings: AlgorithmSettings
    sampling: SamplingSettings

    def __call__(self, group: Group) -> str | None:
        """Set the advantages of the group's trainable samples. Return None, or a reason: "zero variance"
        (DAPO's filter), "reward not finite", "reward too large"."""
        samples = group.trainable
        if self.settings.filter == "zero_variance" and len({sample.reward for sample in samples}) == 1:
            return "zero variance"
        rewards = [self.shaped_reward(sample) for sample in samples]
        if not all(map(math.isfinite, rewards)):
            return "reward not finite"
        scale = self.settings.advantage
        # Under gae the trainer's critic computes advantages from the rewards; under batch, `of_step` does.
        advantages = rewards if scale == "gae" or scale == "batch" else group_advantages(rewards, scale=scale)
        if any(abs(advantage) > MAX_ADVANTAGE for advantage in advantages):
            return "reward too large"
        coef = 1.0 if self.wait_for_step else self.settings.reward_coef
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = coef * advantage
        return None

    @property
    def wait_for_step(self) -> bool:
        """Advantages depend on all samples of an optimizer step."""
        return self.settings.advantage == "batch"

    @property
    def masks_carried(self) -> bool:
        """Tokens that are older than the published weights are masked out of the loss (APRIL)."""
        return self.settings.mask_carried

    def of_step(self, samples: Sequence[Sample]) -> None:
        """Set the advantages of a step, as of one group. Until then they are the shaped rewards."""
        advantages = group_advantages([sample.advantage for sample in samples], scale="group")
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = self.settings.reward_coef * advantage

    def shaped_reward(self, sample: Sample) -> float:
        """The reward of the task minus the overlong penalty and, if it is in the reward, the KL."""
        settings, reward = self.settings, sample.reward or 0.0
        if settings.overlong_penalty:
            reward -= overlong_penalty(
                sample.num_tokens,
                max_completion_tokens=self.sampling.max_completion_tokens,
                buffer=settings.overlong_buffer,
                penalty=settings.overlong_penalty,
            )
        if settings.kl_coef and settings.kl_in == "reward":
            penalty = kl_penalty(sample.behavior_logprobs, sample.reference_logprobs, settings.kl_estimator)
            reward -= settings.kl_coef * penalty
        return reward


GRPO = ComputeAdvantages(AlgorithmSettings(), SamplingSettings())
"""The defaults, which do not depend on the length limit."""


def overlong_penalty(num_tokens: int, *, max_completion_tokens: int, buffer: float, penalty: float) -> float:
    """The soft overlong punishment (DAPO, 2503.14476, eq. 13; PipelineRL 5), to be subtracted.

    It is zero up to (1 - buffer) max_completion_tokens, then rises linearly to `penalty` at
    max_completion_tokens.

    Example:
        >>> [overlong_penalty(n, max_completion_tokens=100, buffer=0.2, penalty=1.0) for n in (80, 90, 100)]
        [0.0, 0.5, 1.0]
    """
    width = buffer * max_completion_tokens
    excess = num_tokens - (max_completion_tokens - width)
    return penalty * min(1.0, excess / width) if excess > 0 and width > 0 else 0.0


def kl_penalty(
    logprobs: Sequence[float], reference_logprobs: Sequence[float], estimator: KLEstimator
) -> float:
    """Sum the estimates of KL(policy || reference) over a sample's tokens.

    k1 is log pi(y) - log pi_ref(y), the penalty of RLHF (2203.02155, eq. 2). Of the three, only k1 in the
    reward gives the gradient of the KL under policy gradients.

    Args:
        logprobs: [num_tokens] under the policy that generated the tokens.
        reference_logprobs: [num_tokens]
    """
    log_ratios = [q - p for p, q in zip(logprobs, reference_logprobs, strict=True)]
    match estimator:
        case "k1":
            return -math.fsum(log_ratios)
        case "k2":
            return math.fsum(x * x / 2 for x in log_ratios)
        case "k3":
            return math.fsum(math.expm1(min(x, MAX_LOG_RATIO)) - x for x in log_ratios)
