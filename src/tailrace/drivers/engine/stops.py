"""Stop strings: the place at which the text of a completion ends it."""

from collections.abc import Callable, Collection, Sequence

Decoder = Callable[[Sequence[int]], str]
"""Decodes token ids to text, with special tokens."""


def stop_window(strings: Sequence[str]) -> int:
    """The most tokens that a stop string has: a token is at least one byte, a character at most four."""
    return 4 * max(map(len, strings), default=0)


def string_reached(decode: Decoder, completion_ids: Sequence[int], strings: Sequence[str]) -> bool:
    """Whether a stop string ends in the last token of a completion, or near before it."""
    # Two more tokens, because the first tokens of a window may decode to other text than in their place.
    text = decode(completion_ids[-stop_window(strings) - 2 :])
    return any(string in text for string in strings)


def first_stop(
    decode: Decoder, before: Sequence[int], ids: Sequence[int], strings: Sequence[str], stop: Collection[int]
) -> int | None:
    """The new tokens, `ids`, up to the first that ends a completion: a `stop`, or the end of a string."""
    before = before[-stop_window(strings) - 2 :]
    for num, id in enumerate(ids, 1):
        if id in stop or (strings and string_reached(decode, [*before, *ids[:num]], strings)):
            return num
    return None
