"""What a turn of an episode reads: the tokens that the chat template writes between two turns, the contexts
of turns that begin a branch (turns.py), and the prompts of agents, which write their own first request."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from tailrace.data.base import DataSettings, MixedSettings, Prompts, sources_of
from tailrace.data.encoding import PromptEncoder, Tokenizer, Tools, render
from tailrace.environments.base import EpisodeOver, Message
from tailrace.errors import BadRow, ConfigError, EnvironmentFailed
from tailrace.turns import Turn, messages_of
from tailrace.types import Prompt

QUESTION, ANSWER, PROBE = "tailrace question", "tailrace answer", "tailrace probe"
"""The fixed conversation before the messages, of which the template's text is not used, and a message that
tells whether the template writes messages of a role at all."""
HistoryMode = Literal["keep", "template"]
"""As EpisodeSettings.history (settings.py)."""


class Chat:
    """Observes (episode.py: Observe) with a chat template.

    The tokens are those that the template writes, in a small conversation, from the end of the assistant's
    text to the end of the next generation prompt. So no token of the policy is rewritten, whatever the
    template does to earlier turns.

    Args:
        kind: of the environment, for errors.
        arguments: of the template, as `data.chat_template_kwargs`.
        role: of the environment's messages.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not write messages of that role
            after a turn of the assistant.
    """

    def __init__(
        self, tokenizer: Tokenizer, kind: str, arguments: Mapping[str, object], role: str = "user"
    ) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments
        if tokenizer.chat_template is None:
            problem = "it needs the chat template of the model's tokenizer, which has none"
            remedy = "add a chat_template.jinja to the model folder, or use a chat model"
            raise ConfigError("environment.kind", kind, problem, remedy)
        try:
            probed = self._text([{"role": role, "content": PROBE}])
            why = "" if PROBE in probed else "it leaves them out"
        except EnvironmentFailed as failed:
            why = failed.detail
        if why:
            problem = f"the model's chat template does not write messages of the role {role!r} ({why})"
            remedy = "choose a model whose template does"
            if role == "tool":
                remedy += ', or set environment.answer_role = "user"'
            raise ConfigError("environment.kind", kind, problem, remedy)

    def observe(self, messages: Sequence[Message], last_id: int | None) -> list[int]:
        """Return the tokens between a turn that ended with `last_id` and the next one.

        The end-of-turn token of the template is left out if the turn ended with it.

        Raises:
            EnvironmentFailed: the template refuses the messages, or leaves out the assistant's text.
        """
        ids = self._tokenizer.encode(self._text(messages), add_special_tokens=False)
        return ids[1:] if ids[:1] == [last_id] else ids

    def _text(self, messages: Sequence[Message]) -> str:
        conversation: list[Message] = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER},
            *messages,
        ]
        try:
            text = render(self._tokenizer, conversation, {"add_generation_prompt": True, **self._arguments})
        except ConfigError:
            raise
        except Exception as why:
            # Templates are programs: they raise errors of their own on messages they do not know.
            raise EnvironmentFailed("template", str(why)) from why
        _, found, after = text.partition(ANSWER)
        if not found:
            raise EnvironmentFailed("template", "it leaves out the text of the assistant")
        return after


class TooManyBranches(Exception):
    """The history was rewritten more often than the settings allow."""


class Contexts:
    """The contexts of one episode.

    Args:
        first: encodes the first request.
        later: encodes later ones, of any length.
        tokenizer: of the history "template"; None: the history is "keep".
        max_branches: sequences that the episode may consist of.
    """

    def __init__(
        self, first: PromptEncoder, later: PromptEncoder, tokenizer: Tokenizer | None, max_branches: int
    ) -> None:
        self._first, self._later, self._tokenizer = first, later, tokenizer
        self._num_free = max_branches - 1

    def first(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> list[int]:
        """Return the tokens of the first request, with the generation prompt. Raises BadRow."""
        return self._first.encode(list(messages), tools)[1]

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
        if continues and self._tokenizer is None:
            return None
        ids = self._later.encode(list(messages), tools)[1]
        if continues and self._tokenizer:
            # By their text: a policy may write tokens that the tokenizer would not.
            decode = self._tokenizer.decode
            if decode(ids).startswith(decode(context_ids)):
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


class RequestEncoder:
    """Encodes the requests of agents as the data room encodes prompts, with the settings of the data
    source."""

    def __init__(
        self, data: DataSettings, tokenizer: Tokenizer, max_context_tokens: int, tools: Tools = ()
    ) -> None:
        """
        Args:
            tools: of every prompt, as JSON schemas.
        """
        self._tokenizer = tokenizer
        self._encoders, self._later = dict[str, PromptEncoder](), dict[str, PromptEncoder]()
        for source in sources_of(data):
            name = source.name if isinstance(source, MixedSettings) else ""
            self._encoders[name] = PromptEncoder(source, tokenizer, max_context_tokens, tools)
            # The episode knows how much room it has.
            of_any_length = source.model_copy(update={"max_prompt_tokens": None})
            self._later[name] = PromptEncoder(of_any_length, tokenizer, tools=tools)

    def contexts(self, prompt: Prompt, history: HistoryMode, max_branches: int) -> Contexts:
        """Return the contexts of an agent whose task is the prompt."""
        name = prompt.source if prompt.source in self._encoders else next(iter(self._encoders))
        tokenizer = self._tokenizer if history == "template" else None
        return Contexts(self._encoders[name], self._later[name], tokenizer, max_branches)

    def history(self, prompt: Prompt, max_branches: int) -> TemplateHistory:
        """Return the history "template" of an episode over the prompt."""
        contexts = self.contexts(prompt, "template", max_branches)
        return TemplateHistory(contexts, opening_messages(prompt), prompt.ids)

    def start(self) -> list[int]:
        """Return the token with which every first request begins.

        Raises:
            ConfigError: there is none.
        """
        starts: set[int] = set()
        for encoder in self._encoders.values():
            for messages in ([_message("user", "Why?")], [_message("user", "1 + 1")]):
                starts.add(encoder.encode(messages)[1][0])
                with suppress(BadRow):  # the template knows no system messages
                    starts.add(encoder.encode([_message("system", "Be brief."), *messages])[1][0])
        if len(starts) > 1:
            problem = "the chat template of the model does not begin every conversation with the same token"
            raise ConfigError("environment.prompt", "agent", problem, 'write "data"')
        return list(starts)


class AgentPrompts:
    """`Prompts` (data/base.py) of which an engine gets the first token only: the agent's first request begins
    with it, and what follows counts as the environment's."""

    def __init__(self, prompts: Prompts, start: Sequence[int]) -> None:
        self._prompts, self._start = prompts, start

    def __getitem__(self, index: int) -> Prompt:
        return replace(self._prompts[index], ids=self._start)


def opening_messages(prompt: Prompt) -> list[Message]:
    """Return the prompt as chat messages."""
    if isinstance(prompt.given, list):
        return prompt.given
    return [_message("user", prompt.text if prompt.given is None else str(prompt.given))]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
