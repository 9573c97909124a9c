"""From the rewards of a complete group to the advantages of its samples."""

import math
from dataclasses import dataclass

from tailrace.algo.advantages import group_advantages
from tailrace.algo.base import AlgorithmSettings
from tailrace.algo.rewards import kl_penalty, overlong_penalty
from tailrace.types import Group, Sample

MAX_ADVANTAGE = 1e15
"""The square of a larger gradient could exceed float32, and its norm would not be finite."""


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
