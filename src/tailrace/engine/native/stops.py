"""The conditions that end a completion."""

from pathlib import Path

from tokenizers import Tokenizer

from tailrace.engine.native.sequence import Sequence
from tailrace.engine.settings import SamplingSettings
from tailrace.model_folder import end_of_text_ids, folder_error
from tailrace.types import FinishReason


class StopConditions:
    """Stop tokens, stop strings and limits of length.

    Args:
        path: the model folder, for its end-of-text tokens and its tokenizer.
        max_tokens: the longest sequence that the engine can hold, prompt included.

    Raises:
        ConfigError: there are stop strings, and the folder has no tokenizer.json.
    """

    def __init__(self, path: Path, sampling: SamplingSettings, max_tokens: int) -> None:
        self._ids = end_of_text_ids(path) | frozenset(sampling.stop_token_ids)
        self._max_completion, self._max_tokens = sampling.max_completion_tokens, max_tokens
        self._strings = sampling.stop
        if self._strings:
            file = path / "tokenizer.json"
            if not file.is_file():
                remedy = "save the tokenizer into the folder"
                raise folder_error(path, "sampling.stop needs a tokenizer.json", remedy)
            self._tokenizer = Tokenizer.from_file(str(file))
            # A token is at least one byte of text, and a character at most four. Two more tokens, because the
            # first tokens of a window may decode to other text than in their place.
            self._window = 4 * max(map(len, self._strings)) + 2

    def exhausted(self, sequence: Sequence) -> bool:
        """Whether there is no room for another token."""
        return sequence.num_completion >= self._max_completion or len(sequence.tokens) >= self._max_tokens

    def reason(self, sequence: Sequence) -> FinishReason | None:
        """Why the newest token is the last one; None if it is not."""
        if sequence.tokens[-1] in self._ids:
            return "stop"
        if self._strings and self._string_reached(sequence.tokens[sequence.num_prompt :]):
            return "stop"
        return "length" if self.exhausted(sequence) else None

    def _string_reached(self, completion_ids: list[int]) -> bool:
        text = self._tokenizer.decode(completion_ids[-self._window :], skip_special_tokens=False)
        return any(string in text for string in self._strings)
