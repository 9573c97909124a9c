"""From the rewards of a complete group to the advantages of its samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.algo.advantages import group_advantages
from tailrace.algo.base import AlgorithmSettings, KLEstimator
from tailrace.types import Group, Sample

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
    max_completion_tokens: int
    """Length limit of a completion."""

    def __call__(self, group: Group) -> str | None:
        """Set the advantages of the group's trainable samples.

        Returns:
            None, or a reason: "zero variance" (DAPO's filter), "reward not finite", "reward too large".
        """
        samples = group.trainable
        if self.settings.filter == "zero_variance" and len({sample.reward for sample in samples}) == 1:
            return "zero variance"
        rewards = [self.shaped_reward(sample) for sample in samples]
        if not all(map(math.isfinite, rewards)):
            return "reward not finite"
        scale = self.settings.advantage
        # Under gae the trainer's critic computes advantages from the rewards.
        advantages = rewards if scale == "gae" else group_advantages(rewards, scale=scale)
        if any(abs(advantage) > MAX_ADVANTAGE for advantage in advantages):
            return "reward too large"
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = advantage
        return None

    def shaped_reward(self, sample: Sample) -> float:
        """The reward of the task minus the overlong penalty and, if it is in the reward, the KL."""
        settings, reward = self.settings, sample.reward or 0.0
        if settings.overlong_penalty:
            reward -= overlong_penalty(
                sample.num_tokens,
                max_completion_tokens=self.max_completion_tokens,
                buffer=settings.overlong_buffer,
                penalty=settings.overlong_penalty,
            )
        if settings.kl_coef and settings.kl_in == "reward":
            penalty = kl_penalty(sample.behavior_logprobs, sample.reference_logprobs, settings.kl_estimator)
            reward -= settings.kl_coef * penalty
        return reward


GRPO = ComputeAdvantages(AlgorithmSettings(), max_completion_tokens=1)
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
    """Sum the estimates of KL(policy || reference) over a sample's tokens (`algo/kl.py` for each token).

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
