"""What ends a response."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from tailrace.engine.base import SamplingSettings
from tailrace.engine.native.cache import Response
from tailrace.engine.native.support import KEY
from tailrace.errors import ConfigError
from tailrace.types import FinishReason


class StopStrings:
    """Whether the text of a completion has just reached one of some strings.

    Raises:
        ConfigError: the folder has no tokenizer to make text with.
    """

    def __init__(self, path: Path, strings: Sequence[str]) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                KEY, str(path), "sampling.stop needs a tokenizer.json", "save the tokenizer into the folder"
            )
        self._tokenizer = Tokenizer.from_file(str(file))
        self._strings = tuple(strings)
        # A token is at least one byte of text, and a character at most four; two more tokens, because
        # the first of a window may decode differently than in its place.
        self._window = 4 * max(map(len, strings)) + 2

    def reached(self, completion: Sequence[int]) -> bool:
        """Looks at the end of the completion only: call it after every token."""
        text = self._tokenizer.decode(completion[-self._window :], skip_special_tokens=False)
        return any(string in text for string in self._strings)


class Stops:
    """The limits and marks of one engine.

    Args:
        eos_ids: the model's own end-of-text tokens.
        max_tokens: the longest context that fits the engine, prompt included.
    """

    def __init__(
        self, path: Path, sampling: SamplingSettings, *, eos_ids: Iterable[int], max_tokens: int
    ) -> None:
        self._ids = frozenset(eos_ids) | frozenset(sampling.stop_token_ids)
        self._max_completion = sampling.max_completion_tokens
        self._max_tokens = max_tokens
        self._strings = StopStrings(path, sampling.stop) if sampling.stop else None

    def exhausted(self, response: Response) -> bool:
        """Whether there is no room for another token."""
        num_tokens = len(response.tokens)
        return num_tokens - response.num_prompt >= self._max_completion or num_tokens >= self._max_tokens

    def reason(self, response: Response) -> FinishReason | None:
        """Why its newest token is the last; None if it is not."""
        if response.tokens[-1] in self._ids:
            return "stop"
        if self._strings and self._strings.reached(response.tokens[response.num_prompt :]):
            return "stop"
        return "length" if self.exhausted(response) else None
