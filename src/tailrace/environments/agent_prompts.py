"""The prompts of agents, which write their own first request."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from tailrace.data.base import DataSettings, MixedSettings, Prompts, sources_of
from tailrace.data.encoding import PromptEncoder
from tailrace.data.tokenizer import Tokenizer
from tailrace.environments.base import Message
from tailrace.errors import BadRow, ConfigError
from tailrace.types import Prompt

Encode = Callable[[Sequence[Message], Sequence[Message] | None], Sequence[int]]
"""The tokens of messages and tools, with the generation prompt. Raises BadRow."""


class RequestEncoder:
    """Encodes the first requests of agents as the data room encodes prompts, with the settings of the data
    source."""

    def __init__(self, data: DataSettings, tokenizer: Tokenizer, max_context_tokens: int) -> None:
        self._encoders = {
            source.name if isinstance(source, MixedSettings) else "": PromptEncoder(
                source, tokenizer, max_context_tokens
            )
            for source in sources_of(data)
        }

    def __call__(self, prompt: Prompt) -> Encode:
        """Return what encodes the first request of an agent whose task is the prompt."""
        first = next(iter(self._encoders.values()))
        encoder = self._encoders.get(prompt.source, first)
        return lambda messages, tools: encoder.encode(list(messages), tools)[1]

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


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
