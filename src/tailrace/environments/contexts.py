"""The contexts of turns that may begin a branch (turns.py): from whole conversations to tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from tailrace.data.encoding import Tokenizer
from tailrace.environments.base import EpisodeOver, Message
from tailrace.errors import BadRow, EnvironmentFailed
from tailrace.turns import Turn, messages_of

Encode = Callable[[Sequence[Message], Sequence[Message] | None], Sequence[int]]
"""The tokens of messages and tools, with the generation prompt. Raises BadRow."""
History = Literal["keep", "template"]
"""As EpisodeSettings.history (settings.py)."""
Extends = Callable[[Sequence[int], Sequence[int]], bool]
"""Whether the text of a context (second) begins with that of another one (first)."""


class TooManyBranches(Exception):
    """The history was rewritten more often than the settings allow."""


def extends(tokenizer: Tokenizer) -> Extends:
    """Return what compares contexts by their text: a policy may write tokens that the tokenizer would not."""

    def is_extended(context_ids: Sequence[int], ids: Sequence[int]) -> bool:
        return tokenizer.decode(ids).startswith(tokenizer.decode(context_ids))

    return is_extended


class Contexts:
    """The contexts of one episode.

    Args:
        first: tokens of the first request.
        later: tokens of a later one, of any length.
        extends: None: the history is "keep".
        max_branches: sequences that the episode may consist of.
    """

    def __init__(self, first: Encode, later: Encode, extends: Extends | None, max_branches: int) -> None:
        self.first, self._later, self._extends = first, later, extends
        self._num_free = max_branches - 1

    def rewritten(
        self,
        context_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        continues: bool,
    ) -> Sequence[int] | None:
        """Return the context of a turn that begins a branch; None: the turn extends the context so far.

        Args:
            context_ids: all tokens so far.
            messages: the whole conversation.
            continues: whether the messages extend the conversation so far.

        Raises:
            BadRow: the chat template refuses the messages.
            TooManyBranches: the episode has as many branches as it may have.
        """
        if continues and self._extends is None:
            return None
        ids = self._later(messages, tools)
        if continues and self._extends and self._extends(context_ids, ids):
            return None
        if not self._num_free:
            raise TooManyBranches
        self._num_free -= 1
        return ids


class TemplateHistory:
    """The history as the chat template writes it, where the environment sends new messages only.

    Args:
        contexts: of the history "template".
        opening: the prompt as chat messages.
        prompt_ids: the prompt.
    """

    def __init__(self, contexts: Contexts, opening: Sequence[Message], prompt_ids: Sequence[int]) -> None:
        self._contexts, self._opening, self._prompt_ids = contexts, opening, prompt_ids

    def __call__(
        self, context_ids: Sequence[int], turns: Sequence[Turn], messages: Sequence[Message]
    ) -> Sequence[int] | None:
        """As Rewritten (episode.py).

        Raises:
            EnvironmentFailed: the template refuses the messages, or the data have made the prompt otherwise.
            EpisodeOver: the episode has as many branches as it may have.
        """
        said = [replace(turn, begins_branch=False) for turn in turns]
        said[-1].messages = []
        conversation = [*self._opening, *messages_of(said), *messages]
        try:
            if len(turns) == 1 and list(self._contexts.first(self._opening, None)) != list(self._prompt_ids):
                detail = (
                    'history = "template" needs prompts that the template writes from their messages alone'
                )
                raise EnvironmentFailed("template", detail)
            return self._contexts.rewritten(context_ids, conversation, None, continues=True)
        except BadRow as why:
            raise EnvironmentFailed("template", str(why)) from why
        except TooManyBranches as why:
            raise EpisodeOver from why
