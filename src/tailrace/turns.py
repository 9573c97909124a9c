"""The turns of an episode, and the branches that they make. Data without tasks, as in types.py.

The context of a turn extends the tokens before it, unless the environment has rewritten the history: a chat
template left out earlier thinking, or an agent summarised. The turn then begins a branch. The model reads
each branch as a sequence of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Turn:
    """A turn of the policy that has ended, and what the environment did after it."""

    num_tokens: int
    """Completion tokens of the sample at the end of the turn. 0: its observation precedes the first turn."""
    finish_reason: FinishReason
    results: list[str | None] = field(default_factory=list)
    """Results of the environment's calls after the turn, in the order in which they began. None: not yet."""
    observation_ids: list[int] = field(default_factory=list)
    """The environment's tokens between this turn and the next one: context that is not trained, without
    log-probs and versions. Empty until the environment has answered."""
    text: str = ""
    """The policy's tokens of the turn as text."""
    messages: list[dict[str, object]] = field(default_factory=list)
    """The environment's answer as chat messages."""
    begins_branch: bool = False
    """The next turn begins a branch: `observation_ids` is its whole context, the prompt included."""


@dataclass(slots=True)
class Branch:
    """Consecutive turns of a sample of which each extends the context of the one before."""

    context_ids: Sequence[int]
    """Tokens before its first turn: the prompt, or the environment's replacement for it."""
    start: int
    """Completion tokens of the sample before the branch."""
    end: int
    """Completion tokens of the sample at the end of the branch."""
    observations: list[tuple[int, list[int]]] = field(default_factory=list)
    """The environment's tokens after `context_ids`, each time with the number of completion tokens of the
    sample before them."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the context, of the completion and of the environment."""
        num_observed = sum(len(ids) for _, ids in self.observations)
        return len(self.context_ids) + self.end - self.start + num_observed

    def response_ids(self, completion_ids: Sequence[int]) -> list[int]:
        """Return what follows its context: the turns with the environment's tokens in their places.
        `completion_ids`: those of the sample."""
        ids: list[int] = []
        start = self.start
        for place, observed in self.observations:
            ids += [*completion_ids[start:place], *observed]
            start = place
        return [*ids, *completion_ids[start : self.end]]


def branches_of(prompt_ids: Sequence[int], turns: Sequence[Turn], num_tokens: int) -> list[Branch]:
    """Return the branches that turns make, at least one. `num_tokens`: completion tokens of the sample."""
    branches = [Branch(prompt_ids, 0, num_tokens)]
    for turn in turns:
        if turn.begins_branch:
            branches[-1].end = turn.num_tokens
            branches.append(Branch(turn.observation_ids, turn.num_tokens, num_tokens))
        elif turn.observation_ids:
            branches[-1].observations.append((turn.num_tokens, turn.observation_ids))
    return branches


def messages_of(turns: Sequence[Turn]) -> list[dict[str, object]]:
    """Return the last branch as chat messages: turns of the policy, answers of the environment."""
    messages: list[dict[str, object]] = []
    for turn in turns:
        if turn.begins_branch:
            messages = []
        else:
            messages += [{"role": "assistant", "content": turn.text}, *turn.messages]
    return messages
