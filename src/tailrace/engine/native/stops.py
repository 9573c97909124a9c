"""The conditions that end a completion."""

from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from tailrace.engine.base import SamplingParams
from tailrace.engine.native.sequence import Sequence
from tailrace.model_folder import end_of_text_ids, folder_error
from tailrace.types import FinishReason


class StopConditions:
    """Stop tokens, stop strings and limits of length.

    Args:
        path: the model folder, for its end-of-text tokens and its tokenizer.
        max_tokens: the longest sequence that the engine can hold, prompt included.
    """

    def __init__(self, path: Path, max_tokens: int) -> None:
        self._path, self._max_tokens = path, max_tokens
        self._end_of_text = end_of_text_ids(path)

    def check(self, sampling: SamplingParams) -> None:
        """Check that requests with these parameters can be served.

        Raises:
            ConfigError: there are stop strings, and the folder has no tokenizer.json.
        """
        if sampling.stop and not self._tokenizer_file.is_file():
            remedy = "save the tokenizer into the folder"
            raise folder_error(self._path, "sampling.stop needs a tokenizer.json", remedy)

    def exhausted(self, sequence: Sequence) -> bool:
        """Whether there is no room for another token."""
        limit = sequence.sampling.max_completion_tokens
        return sequence.num_completion >= limit or len(sequence.tokens) >= self._max_tokens

    def reason(self, sequence: Sequence) -> FinishReason | None:
        """Why the newest token is the last one; None if it is not."""
        id, sampling = sequence.tokens[-1], sequence.sampling
        if id in sampling.stop_token_ids or (id in self._end_of_text and not sampling.ignore_end_of_text):
            return "stop"
        if sampling.stop and self._string_reached(sequence.tokens[sequence.num_prompt :], sampling.stop):
            return "stop"
        return "length" if self.exhausted(sequence) else None

    def _string_reached(self, completion_ids: list[int], strings: tuple[str, ...]) -> bool:
        # A token is at least one byte of text, and a character at most four. Two more tokens, because the
        # first tokens of a window may decode to other text than in their place.
        window = 4 * max(map(len, strings)) + 2
        text = self._tokenizer.decode(completion_ids[-window:], skip_special_tokens=False)
        return any(string in text for string in strings)

    @property
    def _tokenizer_file(self) -> Path:
        return self._path / "tokenizer.json"

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._tokenizer_file))
