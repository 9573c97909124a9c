"""Caches of transformers, taken apart into the states of single sequences and put together again.

The state of a sequence is a block of tensors: keys and values of layers that attend, states of layers that
are recurrent. Sequences that are computed together are the rows of one cache. It is made of their blocks when
other sequences come together than in the step before. In a batch of unequal lengths the keys and values of
the shorter ones have padding on the left.
"""

from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache as OwnCache

from tailrace.drivers.engine.native.cache import Sequence

Block = list[Tensor]
"""The state of one sequence."""


@dataclass(eq=False, slots=True)
class CachedBatch:
    """Rows of one cache. `lengths`: the tokens that it has of each."""

    cache: OwnCache | None
    lengths: list[int]

    def block(self, row: int) -> Block:
        """Views of the state of a row, without padding."""
        length = self.lengths[row]
        rows = [(holder[key][row : row + 1], timed) for holder, key, timed in _tensors(self.cache)]
        return [each[..., -min(length, each.shape[-2]) :, :] if timed else each for each, timed in rows]


def joined(like: OwnCache, blocks: list[Block], lengths: list[int]) -> CachedBatch:
    """Put copies of states together in a cache with the layers of another one, all of at least one token."""
    cache = deepcopy(like)
    for (holder, key, timed), pieces in zip(_tensors(cache), zip(*blocks, strict=True), strict=True):
        longest = max(each.shape[-2] for each in pieces)
        padded = [pad(each, (0, 0, longest - each.shape[-2], 0)) if timed else each for each in pieces]
        holder[key] = torch.cat(padded)
    for layer in cache.layers:
        if hasattr(layer, "cumulative_length"):  # of a sliding window, which forgets its first tokens
            layer.cumulative_length = max(lengths)
    return CachedBatch(cache, lengths)


def emptied(cache: OwnCache) -> OwnCache:
    """A cache with the layers of another one, and tensors without elements."""
    memo = {
        id(holder[key]): holder[key].new_empty([0] * holder[key].dim()) for holder, key, _ in _tensors(cache)
    }
    return deepcopy(cache, memo)


def _tensors(cache: OwnCache | None) -> list[tuple[dict[Any, Tensor], Any, bool]]:
    """The places of all tensors with a row for each sequence, and whether the dimension before the last has a
    position for each token."""
    found: list[tuple[dict[Any, Tensor], Any, bool]] = []
    for layer in cache.layers if cache else ():
        own = vars(layer)
        for name, value in own.items():
            if isinstance(value, Tensor) and value.dim() > 1:
                found.append((own, name, name in ("keys", "values")))
            elif isinstance(value, dict):
                found += [(value, key, False) for key, each in value.items() if isinstance(each, Tensor)]
    return found


class States:
    """The states of all sequences, in the place of `Cache`.

    Args:
        together: sequences for which it is equal are computed in one batch.
        budget: positions of all sequences, with padding.
    """

    in_parts = False  # a state is that of all its tokens: it has no prefix

    def __init__(self, together: Callable[[Sequence], Hashable], *, budget: int) -> None:
        self.budget = budget
        self._suspended: dict[str, tuple[Sequence, Block]] = {}
        """By request id, the oldest first."""
        self._together = together
        self._states: dict[Sequence, Block | tuple[CachedBatch, int]] = {}
        """The block of a sequence, or its batch and its row there."""

    @property
    def num_occupied(self) -> int:
        """Positions of all sequences, with padding."""
        return self._positions(self.sequences())

    def sequences(self) -> list[Sequence]:
        """All sequences."""
        return list(self._states)

    def groups(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Divide sequences into those that are computed together."""
        groups: dict[Hashable, list[Sequence]] = {}
        for each in sequences:
            groups.setdefault((len(each.tokens) > 1, self._together(each)), []).append(each)
        return list(groups.values())

    def fits(self, sequence: Sequence) -> bool:
        """Whether all sequences fit into the budget; suspended ones give way."""
        return self._give_way(self.budget - self.num_occupied)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether all sequences with this one fit into the budget."""
        return self._positions([*self._states.keys() - {sequence}, sequence]) <= self.budget

    def add(self, sequence: Sequence) -> None:
        """Take a sequence. `write` must follow."""
        self._states[sequence] = []
        self.fits(sequence)

    def resume(self, sequence: Sequence) -> bool:
        """Take a sequence with its suspended state; whether there is one."""
        old, block = self._suspended.pop(sequence.id, (None, []))
        if old is None or (old.context, old.pin) != (sequence.context, sequence.pin) or sequence.to_verify:
            return False
        self._states[sequence] = block
        return True

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        del self._states[sequence]

    def move(self, sequence: Sequence) -> None:
        """Nothing: a state grows where it is."""

    def cut(self, sequence: Sequence) -> None:
        """No change: the state of a sequence that loses tokens is computed afterwards."""

    def forget(self) -> None:
        """Drop all that is suspended."""
        self._suspended.clear()

    release = forget

    def suspend(self, sequence: Sequence) -> None:
        """Remove the sequence, and keep its state where the budget has room."""
        block = [piece.clone() for piece in self.read(sequence)]
        self.remove(sequence)
        if block and self._give_way(self.budget - self.num_occupied - sequence.length + 1):
            self._suspended[sequence.id] = sequence, block

    def _give_way(self, room: int) -> bool:
        """Drop the oldest suspended states until the positions of all fit into the room."""
        while self._suspended and sum(each.length - 1 for each, _ in self._suspended.values()) > room:
            del self._suspended[next(iter(self._suspended))]
        return room >= 0

    def write(self, sequence: Sequence, block: Block) -> None:
        """Set the state of a sequence."""
        self._states[sequence] = block

    def read(self, sequence: Sequence) -> Block:
        """Views of the state of a sequence; empty before its first token."""
        state = self._states[sequence]
        return state if isinstance(state, list) else state[0].block(state[1])

    def batch(self, sequences: list[Sequence], like: OwnCache) -> CachedBatch:
        """Return the states of sequences in one cache: that of the last step, if they are its rows."""
        states = [self._states[each] for each in sequences]
        if isinstance(states[0], tuple):
            batch = states[0][0]
            if states == [(batch, row) for row in range(len(batch.lengths))]:
                return batch
        lengths = [len(each.context) for each in sequences]
        blocks = [self.read(each) for each in sequences]
        batch = joined(like, blocks, lengths) if all(blocks) else CachedBatch(None, lengths)
        self._states |= {each: (batch, row) for row, each in enumerate(sequences)}
        return batch

    def _positions(self, sequences: list[Sequence]) -> int:
        groups = self.groups(sequences)
        return sum(len(group) * max(len(each.tokens) for each in group) for group in groups)
