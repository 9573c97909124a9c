"""Contexts of turns: the tokens that the chat template writes between two turns, the contexts of turns that
begin a branch (turns.py), and the prompts of agents, which write their own first request."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from tailrace.contracts.data import Prompts
from tailrace.contracts.environments import EpisodeOver, Message
from tailrace.drivers.data.encoding import OPEN_TAG, ChatTemplate, PromptEncoder, Tokenizer, Tools, ids_after
from tailrace.drivers.data.settings import DataSettings
from tailrace.errors import BadRow, ConfigError, EnvironmentFailed
from tailrace.rollout.episode import Rewritten
from tailrace.turns import Turn, messages_of
from tailrace.types import Prompt

QUESTION, ANSWER, PROBE = "tailrace question", "tailrace answer", "tailrace probe"
"""The fixed conversation before the messages, of which the template's text is not used, and a message that
tells whether the template writes messages of a role at all."""
HistoryMode = Literal["keep", "template"]
"""Values of EpisodeSettings.history (drivers/environments/settings.py)."""


class Chat:
    """Observes (episode.py: Observe) with a chat template.

    The tokens are those that the template writes, in a small conversation, from the end of the assistant's
    text to the end of the next generation prompt. So no token of the policy is rewritten, whatever the
    template does to earlier turns. Raises a ConfigError if the tokenizer has no chat template, or the
    template does not write messages of that role after a turn of the assistant.

    Args:
        kind: of the environment, for errors.
        arguments: of the template, as `data.chat_template_kwargs`.
        role: of the environment's messages.
    """

    def __init__(
        self, tokenizer: Tokenizer, kind: str, arguments: Mapping[str, object], role: str = "user"
    ) -> None:
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer, arguments)
        if tokenizer.chat_template is None:
            problem = "it needs the chat template of the model's tokenizer, which has none"
            remedy = "add a chat_template.jinja to the model folder, or use a chat model"
            raise ConfigError("environment.kind", kind, problem, remedy)
        try:
            probed = self._text([_message(role, PROBE)])
            why = "" if PROBE in probed else "it leaves them out"
        except EnvironmentFailed as failed:
            why = failed.detail
        if why:
            problem = f"the model's chat template does not write messages of the role {role!r} ({why})"
            other = ', or set environment.answer_role = "user"' if role == "tool" else ""
            raise ConfigError("environment.kind", kind, problem, f"choose a model whose template does{other}")

    def observe(self, messages: Sequence[Message], last_id: int | None) -> list[int]:
        """Return the tokens between a turn that ended with `last_id` and the next one. The end-of-turn token
        of the template is left out if the turn ended with it. Raises an EnvironmentFailed if the template
        refuses the messages, or leaves out the assistant's text."""
        ids = ids_after(self._tokenizer, ANSWER, self._text(messages))
        return ids[1:] if ids[:1] == [last_id] else ids

    def _text(self, messages: Sequence[Message]) -> str:
        conversation = [_message("user", QUESTION), _message("assistant", ANSWER), *messages]
        try:
            text = self._template.text(conversation, "turn")
        except BadRow as why:
            raise EnvironmentFailed("template", why.detail) from why
        _, found, after = text.partition(ANSWER)
        if not found:
            raise EnvironmentFailed("template", "it leaves out the text of the assistant")
        return after


class TooManyBranches(Exception):
    """The history was rewritten more often than the settings allow."""


class Contexts:
    """The contexts of one episode.

    Args:
        encoder: encodes the requests. Later ones may have any length.
        tokenizer: of the history "template"; None: the history is "keep".
        max_branches: sequences that the episode may consist of.
    """

    def __init__(self, encoder: PromptEncoder, tokenizer: Tokenizer | None, max_branches: int) -> None:
        self._encoder, self._tokenizer = encoder, tokenizer
        self._num_free = max_branches - 1
        self.opened = ""
        """The tag that the template opens in each turn of the assistant, as <think>."""

    def first(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> list[int]:
        """Return the tokens of the first request, with the generation prompt. Raises BadRow."""
        text, ids = self._encoder.encode(list(messages), tools)
        tag = OPEN_TAG.fullmatch(self._encoder.opened(messages, text))
        self.opened = tag[0] if tag else ""
        return ids

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
        ids = self._encoder.encode(list(messages), tools, any_length=True)[1]
        if continues and self._tokenizer:
            # By their text: a policy may write tokens that the tokenizer would not.
            decode = self._tokenizer.decode
            if decode(ids).startswith(decode(context_ids)):
                return None
        if not self._num_free:
            raise TooManyBranches
        self._num_free -= 1
        return ids


class RequestEncoder:
    """Encodes the requests of agents as the data room encodes prompts, with the settings of the data source.
    `tools`: of every prompt, as JSON schemas."""

    def __init__(
        self, data: DataSettings, tokenizer: Tokenizer, max_context_tokens: int, tools: Tools = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._encoders = {
            source.source_name: PromptEncoder(source, tokenizer, max_context_tokens, tools)
            for source in data.sources
        }

    def contexts(self, prompt: Prompt, history: HistoryMode, max_branches: int) -> Contexts:
        """Return the contexts of an agent whose task is the prompt."""
        name = prompt.source if prompt.source in self._encoders else next(iter(self._encoders))
        tokenizer = self._tokenizer if history == "template" else None
        return Contexts(self._encoders[name], tokenizer, max_branches)

    def history(self, prompt: Prompt, max_branches: int) -> Rewritten:
        """Return the history "template" of an episode whose environment sends new messages only."""
        contexts = self.contexts(prompt, "template", max_branches)
        opening = opening_messages(prompt)

        def rewritten(
            context_ids: Sequence[int], turns: Sequence[Turn], messages: Sequence[Message]
        ) -> Sequence[int] | None:
            said = [replace(turn, begins_branch=False) for turn in turns]
            said[-1].messages = []
            conversation = [*opening, *messages_of(said), *messages]
            try:
                if len(turns) == 1 and list(contexts.first(opening, None)) != list(prompt.ids):
                    needed = 'history = "template" needs prompts that the template writes from their messages'
                    raise EnvironmentFailed("template", f"{needed} alone")
                return contexts.rewritten(context_ids, conversation, None, continues=True)
            except BadRow as why:
                raise EnvironmentFailed("template", str(why)) from why
            except TooManyBranches as why:
                raise EpisodeOver from why

        return rewritten

    def start(self) -> list[int]:
        """Return the token with which every first request begins. Raises a ConfigError if there is none."""
        starts: set[int] = set()
        for encoder in self._encoders.values():
            for messages in ([_message("user", "Why?")], [_message("user", "1 + 1")]):
                starts.add(encoder.encode(messages)[1][0])
                with suppress(BadRow):  # the template knows no system messages
                    starts.add(encoder.encode([_message("system", "Be brief."), *messages])[1][0])
        if len(starts) > 1:
            problem = "the chat template of the model does not begin every conversation with the same token"
            raise ConfigError("environment.prompt", "agent", problem, 'write "data", or use another model')
        return list(starts)


class AgentPrompts:
    """`Prompts` (contracts/data.py) of which an engine gets the first token only: the agent's first request
    begins with it, and what follows counts as the environment's."""

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
