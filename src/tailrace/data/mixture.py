"""Several sources of prompts in one endless order.

Each thousand consecutive prompts have every source in proportion to its weight, in an order that the seed
shuffles anew. The place of a prompt within its source is found without visiting the earlier prompts.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

import numpy as np

from tailrace.data.base import Prompts
from tailrace.types import Prompt

PAGE = 1000
"""Consecutive prompts in which the shares are exact, to one prompt."""


class MixedPrompts:
    """The endless prompts of several sources.

    Args:
        sources: the prompts of each source; each is read from its index 0 on.
        weights: their relative shares. Each source has at least one prompt a page.
    """

    def __init__(
        self, names: Sequence[str], sources: Sequence[Prompts], weights: Sequence[float], seed: int
    ) -> None:
        self._names, self._sources, self._seed = names, sources, seed
        self._shares = shares(weights)
        self._page = lru_cache(maxsize=2)(self._make_page)

    def __getitem__(self, index: int) -> Prompt:
        page, place = divmod(index, PAGE)
        source, earlier = self._page(page)[place]
        prompt = self._sources[source][page * self._shares[source] + earlier]
        number = prompt.row_number
        if number is not None:  # different for rows of different sources
            number = number * len(self._sources) + source
        return replace(prompt, index=index, row_number=number, source=self._names[source])

    def _make_page(self, page: int) -> list[tuple[int, int]]:
        """Return the source of each place, and how many places before it in the page have that source."""
        ordered = [source for source, share in enumerate(self._shares) for _ in range(share)]
        found: list[tuple[int, int]] = []
        seen = [0] * len(self._shares)
        for place in np.random.default_rng([self._seed, page]).permutation(PAGE):
            source = ordered[place]
            found.append((source, seen[source]))
            seen[source] += 1
        return found


def shares(weights: Sequence[float]) -> list[int]:
    """Return how many prompts of a page each source has, by largest remainders; at least one each."""
    total = sum(map(Fraction, weights))
    exact = [max(Fraction(weight) / total * PAGE, Fraction(1)) for weight in weights]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, PAGE - sum(counts))]:
        counts[i] += 1
    counts[counts.index(max(counts))] -= sum(counts) - PAGE  # what rare sources got beyond their share
    return counts
