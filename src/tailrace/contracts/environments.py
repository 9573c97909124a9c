"""The contract of environments: an episode of one or several turns between the policy and an environment."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tailrace.types import FinishReason, Prompt, SampleId

Message = Mapping[str, object]
"""A chat message in OpenAI's format."""


class EpisodeOver(Exception):
    """No room is left for another turn. `Policy.complete` raises it; an environment lets it pass, or catches
    it to give a reward."""


class Completion(NamedTuple):
    """One turn of the policy. `num_context_tokens` counts what precedes it."""

    text: str
    finish_reason: FinishReason
    num_tokens: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    num_context_tokens: int = 0


class Outcome(NamedTuple):
    """An environment's verdict on an episode that has ended.

    Args:
        reward: None: the reward functions score the sample.
        metrics: numbers by name; they become metrics of the step.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = {}


class Policy(Protocol):
    """The policy in one episode."""

    id: SampleId
    """The sample. An episode that is interrupted and goes on has the same."""

    @property
    def context_ids(self) -> Sequence[int]:
        """All tokens of the context up to the end of the turn."""

    def open(self, prompt_ids: Sequence[int]) -> None:
        """Set the context of the first turn, before it. Without this call it is the prompt.

        Args:
            prompt_ids: the prompt's tokens and more. What exceeds the prompt counts as tokens of the
                environment.

        Raises:
            EpisodeOver: no room is left for a turn.
            EnvironmentFailed: the interrupted episode was opened otherwise.
            ValueError: `prompt_ids` does not begin with the prompt's tokens.
        """

    async def complete(
        self,
        messages: Sequence[Message] = (),
        *,
        max_tokens: int | None = None,
        context_ids: Sequence[int] | None = None,
    ) -> Completion:
        """Return the policy's next turn.

        The context of the turn is the context of the last turn, its tokens, and the tokens that the chat
        template writes for `messages`. Nothing is tokenised again. With `context_ids` the history is
        rewritten: the turn begins a branch (turns.py), which is trained as a sequence of its own.

        Args:
            messages: what the environment says after the last turn. Empty before the first turn, whose
                context is the prompt.
            max_tokens: the turn is cut off there; None: where the limits of the episode are.
            context_ids: the whole context of the turn, the prompt included, in place of an extension. The
                context of the first turn is set with `open`.

        Raises:
            EpisodeOver: the last turn was cut off, or the context or the completion has no room for more.
                The finish reason of the sample is then "length".
            EnvironmentFailed: the interrupted episode had other messages here.
        """

    async def call(self, action: Callable[[], Awaitable[str]]) -> str:
        """Await an action outside the model, for example a call of a tool, and record what it returns.

        It comes after the first turn. An action whose result was returned here is not repeated when the
        episode is interrupted and goes on, also after a kill of the run. When the episode is parked, an
        action that is under way is awaited for a limited time.
        """


class Environment(Protocol):
    """Plays episodes, many at the same time."""

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Run one episode.

        An episode that was interrupted begins again here, with a policy that returns the recorded turns and
        results first. So what an environment does may depend on the prompt, on the turns, and on the results
        of `policy.call` only.
        """
