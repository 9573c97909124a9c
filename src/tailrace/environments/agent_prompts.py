"""The prompts of agents, which write their own first request, and the contexts of later turns."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from tailrace.data.base import DataSettings, MixedSettings, Prompts, sources_of
from tailrace.data.encoding import PromptEncoder, Tokenizer, Tools
from tailrace.environments.base import Message
from tailrace.environments.contexts import Contexts, Encode, History, TemplateHistory, extends
from tailrace.errors import BadRow, ConfigError
from tailrace.types import Prompt


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
        self._extends = extends(tokenizer)
        self._encoders, self._later = dict[str, PromptEncoder](), dict[str, PromptEncoder]()
        for source in sources_of(data):
            name = source.name if isinstance(source, MixedSettings) else ""
            self._encoders[name] = PromptEncoder(source, tokenizer, max_context_tokens, tools)
            # The episode knows how much room it has.
            of_any_length = source.model_copy(update={"max_prompt_tokens": None})
            self._later[name] = PromptEncoder(of_any_length, tokenizer, tools=tools)

    def contexts(self, prompt: Prompt, history: History, max_branches: int) -> Contexts:
        """Return the contexts of an agent whose task is the prompt."""
        name = prompt.source if prompt.source in self._encoders else next(iter(self._encoders))
        first, later = _encode(self._encoders[name]), _encode(self._later[name])
        return Contexts(first, later, self._extends if history == "template" else None, max_branches)

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


def _encode(encoder: PromptEncoder) -> Encode:
    return lambda messages, tools: encoder.encode(list(messages), tools)[1]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
