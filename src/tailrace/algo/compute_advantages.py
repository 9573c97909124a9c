"""From the rewards of a group to the advantages of its samples: the last thing before it can be trained."""

from dataclasses import dataclass

from tailrace.algo.advantages import group_advantages
from tailrace.algo.base import AlgorithmSettings
from tailrace.algo.rewards import kl_penalty, overlong_penalty
from tailrace.types import Group, Sample


@dataclass(frozen=True, slots=True)
class ComputeAdvantages:
    """Sets the advantages of a judged group, or says why it must not be trained.

    `Sample.reward` stays what the task gave; what shapes it is in the advantage only. The filter, too, asks
    what the task gave: lengths nearly always differ.
    """

    settings: AlgorithmSettings
    max_tokens: int
    """Of a completion: its limit."""

    def __call__(self, group: Group) -> str | None:
        samples = group.trainable
        if self.settings.filter == "zero_variance" and len({sample.reward for sample in samples}) == 1:
            return "zero variance"
        rewards = [self.shaped_reward(sample) for sample in samples]
        scale = self.settings.advantage
        # Under gae the trainer's critic makes an advantage a token of it.
        advantages = rewards if scale == "gae" else group_advantages(rewards, scale=scale)
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = advantage
        return None

    def shaped_reward(self, sample: Sample) -> float:
        """The task's reward less the punishment for length and, if it is to be in the reward, the KL."""
        settings, reward = self.settings, sample.reward or 0.0
        if settings.overlong_penalty:
            reward -= overlong_penalty(
                sample.num_tokens,
                max_tokens=self.max_tokens,
                buffer=settings.overlong_buffer,
                penalty=settings.overlong_penalty,
            )
        if settings.kl_coef and settings.kl_in == "reward":
            penalty = kl_penalty(sample.behavior_logprobs, sample.reference_logprobs, settings.kl_estimator)
            reward -= settings.kl_coef * penalty
        return reward


GRPO = ComputeAdvantages(AlgorithmSettings(), max_tokens=1)
"""The defaults, in which no length matters."""
