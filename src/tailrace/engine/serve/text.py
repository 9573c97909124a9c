"""From token ids to text, piece by piece, and to the strings of log-probs."""

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Text:
    """The text of one sample.

    Args:
        stops: the text ends before the first of these strings that appears in it.
        include_stop: the text ends after it instead.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, include_stop: bool, skip_special: bool
    ) -> None:
        self._tokenizer, self._stops, self._include_stop = tokenizer, stops, include_stop
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._undecoded: list[int] = []
        """The last tokens, as long as their bytes are no complete characters."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stop: str | None = None
        """The stop string that has ended the text."""

    def extend(self, ids: Sequence[int], *, ended: bool) -> str:
        """Append tokens and return the text that has become certain.

        Args:
            ended: no more tokens follow.
        """
        for id in ids:
            piece = self._stream.step(self._tokenizer, id)
            if piece is None:
                self._undecoded.append(id)
            else:
                self._undecoded.clear()
                self._held += piece
        if ended:
            self._held += self._tokenizer.decode(self._undecoded, skip_special_tokens=self._skip_special)
        if self.stop is not None:
            return ""
        length = self._first_stop() if self._stops else None
        if length is None:
            length = len(self._held) if ended else len(self._held) - self._num_uncertain()
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _first_stop(self) -> int | None:
        """Where the text ends if it contains a stop string."""
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        at, self.stop = min(found)
        return at + len(self.stop) * self._include_stop

    def _num_uncertain(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)


class TokenStrings:
    """The text of single tokens, as in log-probs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = lru_cache(maxsize=1 << 18)(
            lambda id: str(tokenizer.decode([id], skip_special_tokens=False))
        )

    def __call__(self, id: int, *, as_ids: bool) -> str:
        """Return the text of a token.

        Args:
            as_ids: "token_id:N" instead, from which a client can read the id.
        """
        return f"token_id:{id}" if as_ids else self._decode(id)
