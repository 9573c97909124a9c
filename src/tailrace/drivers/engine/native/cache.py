"""The KV cache: a sequence occupies a slot in the smallest tier that holds its tokens.

A sequence that outgrows its tier is copied to the next one. Capacities grow geometrically, so the lengths
within a tier are alike and attention over a tier computes little padding. The keys of each layer are a tensor
of their own, a piece, and so are its values. All slots lie in the same pieces, tier after tier: one kernel
reaches all of them. Together they never exceed the budget. What grows or moves does so piece by piece: only
of one piece both old and new exist.

Suffixes: K key-value heads, N positions, D head dimension.
"""

from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from tailrace.drivers.engine.native.matches import Matches
from tailrace.types import SamplingParams

SMALLEST = 80
GROWTH = 1.6


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. While it runs, the KV cache holds all of its tokens but the last. Its slot may hold keys
    and values of refused drafts behind them, which the next tokens overwrite."""

    id: str
    tokens: list[int]
    """Prompt and completion."""
    num_prompt: int
    noise_stream: int
    """Stream of random numbers, from the request's seed (sampler.py)."""
    sampling: SamplingParams
    greedy: bool = False
    pin: int | None = None
    """The version of the weights; None: the newest."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the last tokens, which are not yet in an output."""
    prompt_version: int | None = None
    """The weights that computed the cached prompt; None if they are not known."""
    num_unread: int = 0
    """Tokens that were drawn, and that the host has not read from the device."""
    max_age: int | None = None
    oldest_version: int | None = None
    """Both as in the request; of the tokens drawn since then, once new weights were loaded."""
    to_verify: bool = False
    """Its context is to be computed, and each of its tokens drawn again."""
    verified: list[float] | None = None
    """Log-probs of the tokens that its verification has kept, until they are in an output."""
    matches: Matches | None = None
    """The texts of its prompt, from which drafts are taken; None: there are no drafts."""

    @property
    def length(self) -> int:
        """Tokens, those included that are not read."""
        return len(self.tokens) + self.num_unread

    @property
    def num_completion(self) -> int:
        return self.length - self.num_prompt

    @property
    def context(self) -> list[int]:
        """All tokens but the last, which is the input of the next decode step."""
        return self.tokens[:-1]


Slot = tuple[int, int]
"""Positions of the pieces: the first one, and how many."""


@dataclass(eq=False, slots=True)
class Tier:
    """Slots of one capacity, one after another from `start` on. The sequences that run have the first ones:
    when one leaves, the last one moves into its slot. Those that are suspended have the last ones."""

    capacity: int
    start: int = 0
    num_slots: int = 0
    running: list[Sequence] = field(default_factory=list)
    suspended: list[Sequence] = field(default_factory=list)

    def slots(self) -> dict[Sequence, Slot]:
        last = enumerate(reversed(self.suspended), self.num_slots - len(self.suspended))
        numbered = *enumerate(self.running), *last
        return {each: (self.start + number * self.capacity, self.capacity) for number, each in numbered}


class Cache:
    """All tiers. Sequences come, leave and grow; then `slots` moves keys and values to where they belong.
    What an aborted request has in its slot is kept until the room is needed: a partial rollout that is
    resumed would otherwise compute its whole context again. All positions of an occupied slot are finite,
    because attention of a CPU multiplies those beyond the length by zero.

    Args:
        empty: [layers, 0, K, D], of the cache's device and type.
        max_tokens: the longest sequence, at most the budget.
        budget: positions that may be allocated.
    """

    in_parts = True
    """Whether a context may be computed in several parts, or copied from a sequence that begins with it."""

    def __init__(self, empty: Tensor, *, max_tokens: int, budget: int) -> None:
        self.budget, self._empty, self._capacities = budget, empty, capacities(max_tokens)
        self.release()

    def release(self) -> None:
        """Begin without any memory."""
        self.size, self.tiers = 0, [Tier(capacity) for capacity in self._capacities]
        self.pieces = [_piece_like(self._empty[0], 1) for _ in range(2 * len(self._empty))]
        """[size + 1, K, D] each: keys and values of the first layer, of the second, and so on. The last
        position is of no sequence: a decode step writes there what rows without a sequence compute."""
        self._tier_of: dict[Sequence, Tier] = {}
        self._placed: dict[Sequence, Slot] = {}
        """Where keys and values are."""
        self._suspended: dict[str, Sequence] = {}
        """By request id, the oldest first."""

    @property
    def num_occupied(self) -> int:
        """Positions of the slots of running sequences."""
        return sum(len(tier.running) * tier.capacity for tier in self.tiers)

    @property
    def num_allocated(self) -> int:
        """Positions of all slots."""
        return sum(tier.num_slots * tier.capacity for tier in self.tiers)

    def sequences(self) -> list[Sequence]:
        """Running sequences, by tier and slot: the rows of a decode step."""
        return list(chain.from_iterable(tier.running for tier in self.tiers))

    def slots(self) -> dict[Sequence, Slot]:
        """The slots of all sequences, with their keys and values; the rest of a new slot has zeros."""
        slots: dict[Sequence, Slot] = {}
        for tier in self.tiers:
            slots |= tier.slots()
        if slots != self._placed:
            self._move(slots)
        return slots

    def fits(self, sequence: Sequence) -> bool:
        """Whether the slot that the sequence has is large enough for its tokens."""
        return self.num_free(sequence) >= 0

    def num_free(self, sequence: Sequence) -> int:
        """Positions of the sequence's slot beyond its tokens."""
        return self._tier_of[sequence].capacity - sequence.length

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a slot for the sequence's tokens fits into the budget, in place of the slot it has."""
        tier = self._tier_of.get(sequence)
        held = tier.capacity if tier else 0
        return self.num_occupied - held + self._smallest_tier(sequence).capacity <= self.budget

    def add(self, sequence: Sequence) -> None:
        """Give the sequence a slot, of zeros."""
        self._placed.pop(sequence, None)
        self._place(sequence)

    def resume(self, sequence: Sequence) -> bool:
        """Give the sequence a slot with what is kept of a suspended one with its id, context and pin; whether
        there is one. One with its id alone is dropped."""
        if (old := self._suspended.get(sequence.id)) is None:
            return False
        self._drop(old)
        is_same = (old.context, old.pin) == (sequence.context, sequence.pin) and not sequence.to_verify
        if is_same:
            self._placed[sequence] = self._placed[old]
            self._place(sequence)
        return is_same

    def remove(self, sequence: Sequence) -> Tier:
        """Free the sequence's slot. Returns its tier."""
        tier = self._tier_of.pop(sequence)
        slot = tier.running.index(sequence)
        if (last := tier.running.pop()) is not sequence:
            tier.running[slot] = last
        return tier

    def move(self, sequence: Sequence) -> None:
        """Give the sequence a slot in the tier that its tokens need."""
        self.remove(sequence)
        self._place(sequence)

    def cut(self, sequence: Sequence) -> None:
        """Drop what the sequence's slot holds behind its context, after it has lost tokens."""
        self.copy(sequence, sequence, len(sequence.context))
        self.move(sequence)

    def suspend(self, sequence: Sequence) -> None:
        """Remove the sequence, and keep what its slot holds until the room is needed."""
        self.remove(sequence).suspended.append(sequence)
        self._suspended[sequence.id] = sequence

    def forget(self) -> None:
        """Drop all that is suspended."""
        for sequence in list(self._suspended.values()):
            self._drop(sequence)

    def copy(self, source: Sequence, target: Sequence, num_tokens: int) -> None:
        """Let the target begin with the first positions of the source."""
        start, _ = self._placed[source]
        self._placed[target] = start, num_tokens

    def _smallest_tier(self, sequence: Sequence) -> Tier:
        return next(tier for tier in self.tiers if tier.capacity >= sequence.length)

    def _drop(self, sequence: Sequence) -> Tier:
        del self._suspended[sequence.id]
        tier = next(tier for tier in self.tiers if sequence in tier.suspended)
        tier.suspended.remove(sequence)
        return tier

    def _place(self, sequence: Sequence) -> None:
        tier = self._smallest_tier(sequence)
        if len(tier.running) + len(tier.suspended) == tier.num_slots:
            self._enlarge(tier)
        tier.running.append(sequence)
        self._tier_of[sequence] = tier

    def _enlarge(self, tier: Tier) -> None:
        """Give a full tier twice its slots, as far as the budget allows; `has_room` guarantees one more.
        Suspended ones are dropped for it first, then other tiers give up their free slots."""
        wanted = max(4, tier.num_slots) * tier.capacity
        while self._suspended and self.budget - self.num_allocated < wanted:
            self._drop(next(iter(self._suspended.values()))).num_slots -= 1
        if self.budget - self.num_allocated < tier.capacity:
            for each in self.tiers:
                each.num_slots = len(each.running)
        tier.num_slots += min(wanted, self.budget - self.num_allocated) // tier.capacity
        start = 0
        for each in self.tiers:
            each.start = start
            start += each.num_slots * each.capacity

    def _move(self, slots: dict[Sequence, Slot]) -> None:
        size, nowhere = self.size, (0, 0)
        if (end := max(tier.start + tier.num_slots * tier.capacity for tier in self.tiers)) > size:
            size = max(end, min(self.budget, size * 3 // 2))
        moves = [(self._placed.get(each, nowhere), slot) for each, slot in slots.items()]
        moves = [(was, slot) for was, slot in moves if was != slot or size > self.size]
        for index in range(len(self.pieces)):
            self.pieces[index] = _moved(self.pieces[index], moves, size if size > self.size else 0)
        self._placed, self.size = slots, size


def _piece_like(piece: Tensor, size: int) -> Tensor:
    """[size, K, D]. On a CPU the positions of a head adjoin: attention reads them 1.3 times as fast."""
    layout = (1, 0, 2) if piece.is_cpu else (0, 1, 2)
    return torch.empty_permuted((size, *piece.shape[1:]), layout, dtype=piece.dtype, device=piece.device)


def _moved(piece: Tensor, moves: list[tuple[Slot, Slot]], larger: int) -> Tensor:
    """The piece, or one for so many positions, with slots at their new places, and zeros where they grew."""
    taken = [piece[start : start + num] for (start, num), _ in moves]
    if larger:
        piece = _piece_like(piece, larger + 1)
    else:
        taken = [rows.clone() for rows in taken]
    for rows, ((_, num), (start, capacity)) in zip(taken, moves, strict=True):
        piece[start : start + num] = rows
        piece[start + num : start + capacity] = 0
    return piece


def capacities(max_tokens: int) -> list[int]:
    """The capacities of the tiers: growing geometrically, the last one exactly `max_tokens`."""
    sizes, size = [], float(SMALLEST)
    while size < max_tokens:
        sizes.append(int(size))
        size *= GROWTH
    return [*sizes, max_tokens]
