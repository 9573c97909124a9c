"""The lengths of a simulation's responses, without running it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from tailrace.data.base import Epochs
from tailrace.sim.settings import SimSettings
from tailrace.sim.world import Lengths, SimPrompts
from tailrace.types import Group, Sample, SampleId


def response_lengths(sim: SimSettings, group_size: int, prompts: Iterable[int], seed: int) -> list[list[int]]:
    """Return the lengths of the responses to prompts, with the weights that a run begins with."""
    length_of, rows = Lengths(sim.lengths, seed), sim.lengths.rows
    drawn = SimPrompts(sim.lengths.prompt_tokens, Epochs(rows, seed) if rows else None)
    groups = [Group(drawn[index], group_size, []) for index in prompts]
    return [
        [length_of(Sample(SampleId(group.prompt.index, 0, k), group)) for k in range(group_size)]
        for group in groups
    ]


@dataclass(frozen=True)
class Workload:
    """The responses of the first prompts.

    Args:
        groups: the lengths of each group's responses, in tokens.
        prompt_tokens: of each prompt.
    """

    groups: Sequence[Sequence[int]]
    prompt_tokens: int

    @cached_property
    def mean_tokens(self) -> float:
        """Of a response."""
        return fmean(fmean(group) for group in self.groups)

    @cached_property
    def mean_context(self) -> float:
        """Positions of a running request, mean over its decode steps."""
        squares = fmean(fmean(tokens**2 for tokens in group) for group in self.groups)
        return self.prompt_tokens + squares / self.mean_tokens / 2

    @cached_property
    def longest_of_group(self) -> float:
        """Mean over groups."""
        return self.longest(1)

    def longest(self, num_groups: int) -> float:
        """Longest response of a rollout of so many groups, mean over rollouts."""
        return fmean(max(rollout) for rollout in self._rollouts(num_groups))

    def longest_of_race(self, wanted: int, launched: int) -> float:
        """Longest trained response of a round of tail batching (RollPacker 3), mean over rounds: the first of
        the launched groups win, and the others have a round of their own when there are enough."""
        longest, deferred, rounds = self._longest, list[int](), list[int]()
        for first in range(0, len(longest) - launched + 1, launched):
            ordered = sorted(longest[first : first + launched])
            rounds.append(ordered[wanted - 1])
            deferred += ordered[wanted:]
            if len(deferred) >= wanted:
                rounds.append(max(deferred[:wanted]))
                del deferred[:wanted]
        return fmean(rounds)

    def longest_of_step(self, num_groups: int, groups_per_step: int) -> float:
        """Longest response of a step, where the groups of a rollout are trained from short to long and each
        step starts the rest again; mean over steps."""
        ordered = [sorted(rollout) for rollout in self._rollouts(num_groups)]
        return fmean(fmean(rollout[groups_per_step - 1 :: groups_per_step]) for rollout in ordered)

    @cached_property
    def _longest(self) -> list[int]:
        return [max(group) for group in self.groups]

    def _rollouts(self, num_groups: int) -> list[list[int]]:
        """The longest response of each group, by rollout. What is too short for one is left out."""
        last = max(1, len(self._longest) - num_groups + 1)
        return [self._longest[first : first + num_groups] for first in range(0, last, num_groups)]
