"""The tokens that followed the same ones before, in the texts of one prompt."""

from collections.abc import Sequence
from typing import NamedTuple

LENGTHS = (4, 2)
"""Tokens that a place must share with the end of a text; the longer match is better."""


class Match(NamedTuple):
    """Tokens that may follow, and how many tokens before them are those before the place that was found."""

    ids: list[int]
    length: int


class Matches:
    """Finds the place of the last tokens of a text in the texts of its prompt: itself, others that are
    generated now or were, and references. This is prompt lookup (Saxena 2023; transformers'
    `prompt_lookup_num_tokens`) over several texts.

    Args:
        prompt: the tokens with which all texts begin.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt, self._references = prompt, set[tuple[int, ...]]()
        self._texts: list[Sequence[int]] = []
        self._num_read: list[int] = []
        """Tokens of each text whose places are known."""
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}
        """The text and the place after some tokens; where several have them, the last one that was read."""

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text with its prompt. It may grow later."""
        self._texts.append(tokens)
        self._num_read.append(0)

    def refer(self, references: Sequence[Sequence[int]]) -> None:
        """Add completions, the best first. Those that are known are left out."""
        for each in reversed(references):
            if (ids := (*each,)) not in self._references:
                self._references.add(ids)
                self.add([*self._prompt[-LENGTHS[0] :], *ids])

    def find(self, tokens: Sequence[int], num: int) -> Match | None:
        """At most so many tokens that followed the last ones of a text; None: they are new."""
        for number, text in enumerate(self._texts):
            first, self._num_read[number] = self._num_read[number], max(0, len(text) - 1)
            for end in range(first + 1, len(text)):
                for length in LENGTHS:
                    if end >= length:
                        self._places[(*text[end - length : end],)] = number, end
        for length in LENGTHS:
            found = self._places.get((*tokens[-length:],)) if len(tokens) >= length else None
            if found and (ids := self._texts[found[0]][found[1] : found[1] + num]):
                return Match([*ids], length)
        return None
