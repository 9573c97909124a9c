"""Tokens as text, each one alone."""

from collections.abc import Sequence
from pathlib import Path

from tailrace.errors import ConfigError

CONTEXT = 6
"""Tokens before a token that are decoded with it: some tokenizers write a space only between two tokens."""


class TokenTexts:
    """Decodes token ids one by one.

    Args:
        folders: model folders; the first that has a tokenizer.json is used.

    Raises:
        ConfigError: none of them has one, or it cannot be read.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        from tokenizers import Tokenizer

        path = next(
            (each / "tokenizer.json" for each in folders if (each / "tokenizer.json").is_file()), None
        )
        if path is None:
            places = ", ".join(map(str, folders))
            raise ConfigError("model.path", places, "no folder has a tokenizer.json", "put one there")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as why:  # the library raises bare exceptions
            problem = f"the tokenizer cannot be read ({why})"
            raise ConfigError("model.path", str(path), problem, "put a copy there") from why

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. Joined they are the text, but for characters of several tokens."""
        return [self._text(ids[max(0, end - CONTEXT) : end + 1]) for end in range(len(ids))]

    def _text(self, ids: Sequence[int]) -> str:
        before: str = self._tokenizer.decode(ids[:-1], skip_special_tokens=False)
        whole: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        if whole.startswith(before):
            return whole[len(before) :]
        alone: str = self._tokenizer.decode(ids[-1:], skip_special_tokens=False)
        return alone
