"""The KV cache: a sequence occupies a slot in the smallest tier that holds its tokens.

A sequence that outgrows its tier is copied to the next one. Capacities grow geometrically, so the lengths
within a tier are alike and attention over a tier computes little padding. The keys of each layer are a tensor
of their own, a piece, and so are its values. All slots lie in the same pieces, tier after tier, and behind
them the suspended keys and values: one kernel reaches all of them from one address. Together they never
exceed the budget. What grows or moves does so piece by piece: only of one piece both old and new exist.

Suffixes: K key-value heads, N positions, D head dimension.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from tailrace.types import SamplingParams

SMALLEST = 80
GROWTH = 1.6


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. While it runs, the KV cache holds all of its tokens but the last."""

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
    is_filled: bool = False
    """Whether the cache holds its context."""
    num_unread: int = 0
    """Tokens that were drawn, and that the host has not read from the device."""

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


class Range(NamedTuple):
    """Positions of the pieces: the first one, how many are used, and how many there are."""

    start: int
    used: int
    capacity: int


class Tier:
    """Slots of one capacity, one after another from `start` on. The sequences occupy the first ones: when one
    leaves, the last one moves into its slot."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.start, self.num_slots = capacity, 0, 0
        self.sequences: list[Sequence] = []

    def remove(self, sequence: Sequence) -> None:
        slot = self.sequences.index(sequence)
        if (last := self.sequences.pop()) is not sequence:
            self.sequences[slot] = last


Kept = TypeVar("Kept")


class SuspendedKV(Generic[Kept]):
    """Keys and values of aborted requests, by request id, the oldest first.

    A partial rollout that is resumed would otherwise compute its whole context again.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[list[int], int | None, Kept]] = {}
        self.num_tokens = 0
        """Positions of all of them."""

    def all(self) -> list[Kept]:
        return [kept for *_, kept in self._kept.values()]

    def put(self, sequence: Sequence, keep: Callable[[], Kept], room: int) -> None:
        """Keep what `keep` returns for the sequence's context.

        Args:
            room: positions that all suspended ones may take. The oldest are dropped for the new one; one that
                is larger than the room is not kept.
        """
        context = sequence.context
        self.shrink(room - len(context))
        if len(context) <= room:
            self._kept[sequence.id] = context, sequence.pin, keep()
            self.num_tokens += len(context)

    def take(self, sequence: Sequence) -> Kept | None:
        """Remove and return those of the request; None if there are none or its context or pin is another."""
        if sequence.id not in self._kept:
            return None
        context, pin, kept = self._kept.pop(sequence.id)
        self.num_tokens -= len(context)
        return kept if (context, pin) == (sequence.context, sequence.pin) else None

    def shrink(self, num_tokens: int) -> None:
        """Drop the oldest until at most `num_tokens` positions are kept."""
        while self._kept and self.num_tokens > num_tokens:
            context, *_ = self._kept.pop(next(iter(self._kept)))
            self.num_tokens -= len(context)


@dataclass(eq=False, slots=True)
class Span:
    """Where suspended keys and values lie."""

    start: int
    num_tokens: int


class Cache:
    """All tiers.

    All positions of an occupied slot are finite, because attention of a CPU multiplies those beyond the
    length by zero.

    Args:
        empty: [layers, 0, K, D], of the cache's device and type.
        max_tokens: the longest sequence, at most the budget.
        budget: positions that may be allocated.
    """

    lends_prompts = True
    """Whether a prompt may be copied from a running sequence."""
    in_parts = True
    """Whether a context may be computed in several parts."""

    def __init__(self, empty: Tensor, *, max_tokens: int, budget: int) -> None:
        self.budget = budget
        self.tiers = [Tier(capacity) for capacity in capacities(max_tokens)]
        self.suspended = SuspendedKV[Span]()
        self.pieces = [empty.new_empty(1, *empty.shape[2:]) for _ in range(2 * len(empty))]
        """[size + 1, K, D] each: keys and values of the first layer, of the second, and so on. The last
        position is of no sequence: a decode step writes there what rows without a sequence compute."""
        self.num_changes = 0
        """How often slots were given, moved or freed."""
        self._tier_of: dict[Sequence, Tier] = {}

    @property
    def size(self) -> int:
        """Positions that the pieces have room for."""
        return len(self.pieces[0]) - 1

    @property
    def num_occupied(self) -> int:
        """Positions of the occupied slots."""
        return sum(len(tier.sequences) * tier.capacity for tier in self.tiers)

    @property
    def num_allocated(self) -> int:
        """Positions of all slots."""
        return sum(tier.num_slots * tier.capacity for tier in self.tiers)

    def sequences(self) -> list[Sequence]:
        """All sequences, in the order of their slots."""
        return list(chain.from_iterable(tier.sequences for tier in self.tiers))

    def slots(self) -> dict[Sequence, tuple[int, int]]:
        """The first position of each sequence's slot, and its capacity; in their order."""
        return {
            sequence: (tier.start + slot * tier.capacity, tier.capacity)
            for tier in self.tiers
            for slot, sequence in enumerate(tier.sequences)
        }

    def fits(self, sequence: Sequence) -> bool:
        """Whether the slot that the sequence has is large enough for its tokens."""
        return sequence.length <= self._tier_of[sequence].capacity

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a slot for the sequence's tokens fits into the budget, in place of the slot it has."""
        tier = self._tier_of.get(sequence)
        held = tier.capacity if tier else 0
        return self.num_occupied - held + self._smallest_tier(sequence).capacity <= self.budget

    def add(self, sequence: Sequence) -> None:
        """Give the sequence a slot, with zeros."""
        self._place(sequence)

    def resume(self, sequence: Sequence) -> bool:
        """Give the sequence a slot with its suspended keys and values; whether there are any."""
        span = self.suspended.take(sequence)
        if span is not None:
            self._place(sequence, self.range_of(span))
        return span is not None

    def remove(self, sequence: Sequence) -> None:
        """Free the sequence's slot."""
        tier = self._tier_of[sequence]
        last = tier.sequences[-1]
        before: dict[Sequence | Span, Range | None] = {}
        if last is not sequence:
            before = {last: self.range_of(last)}
        del self._tier_of[sequence]
        tier.remove(sequence)
        self._moved(before)

    def move(self, sequence: Sequence) -> None:
        """Copy the sequence to the tier that its tokens need."""
        self._place(sequence, self.range_of(sequence))

    def release(self) -> None:
        """Free the memory of an empty cache."""
        self.suspended.shrink(0)
        for tier in self.tiers:
            tier.num_slots = 0
        self._arrange()
        self.pieces = [piece.new_empty(1, *piece.shape[1:]) for piece in self.pieces]

    def suspend(self, sequence: Sequence) -> None:
        """Keep what the cache holds of a sequence that is about to be removed, where the budget has room."""

        def keep() -> Span:
            start, num_tokens, _ = self.range_of(sequence)
            spans = self.suspended.all()
            end = max((each.start + each.num_tokens for each in spans), default=self.num_allocated)
            span = Span(end, num_tokens)
            before: dict[Sequence | Span, Range | None] = {span: Range(start, num_tokens, num_tokens)}
            if end + num_tokens > self.size:
                before |= {each: self.range_of(each) for each in spans}
                self._arrange([*spans, span])
            self._moved(before)
            return span

        self.suspended.put(sequence, keep, self.budget - self.num_allocated)

    def copy(self, source: Sequence, target: Sequence, num_tokens: int) -> None:
        """Copy the first positions of a sequence to another one."""
        start, to = self.range_of(source).start, self.range_of(target).start
        for piece in self.pieces:
            piece[to : to + num_tokens] = piece[start : start + num_tokens]

    def range_of(self, each: Sequence | Span) -> Range:
        """The slot of a sequence, of which its context is used; or the positions of a span."""
        if isinstance(each, Span):
            return Range(each.start, each.num_tokens, each.num_tokens)
        tier = self._tier_of[each]
        return Range(tier.start + tier.sequences.index(each) * tier.capacity, each.length - 1, tier.capacity)

    def _smallest_tier(self, sequence: Sequence) -> Tier:
        return next(tier for tier in self.tiers if tier.capacity >= sequence.length)

    def _place(self, sequence: Sequence, source: Range | None = None) -> None:
        """Give the sequence a slot and fill it with a range of positions, or with zeros without one."""
        tier, old = self._smallest_tier(sequence), self._tier_of.get(sequence)
        is_full = len(tier.sequences) == tier.num_slots
        others: Iterable[Sequence | Span] = old.sequences[-1:] if old else ()
        if is_full:
            others = [*self.sequences(), *self.suspended.all()]
        before: dict[Sequence | Span, Range | None] = {each: self.range_of(each) for each in others}
        if old:
            old.remove(sequence)
        if is_full:
            self._enlarge(tier)
            spans = self.suspended.all()
            self._arrange(spans)
            before = {each: was for each, was in before.items() if each in self._tier_of or each in spans}
        tier.sequences.append(sequence)
        self._tier_of[sequence] = tier
        self._moved(before | {sequence: source})

    def _enlarge(self, tier: Tier) -> None:
        """Give a full tier twice its slots, as far as the budget allows; `has_room` guarantees one more.

        Suspended ones are dropped for it first, then other tiers give up their free slots.
        """
        wanted = max(4, tier.num_slots)
        self.suspended.shrink(self.budget - self.num_allocated - wanted * tier.capacity)
        if self.budget - self.num_allocated < tier.capacity:
            for each in self.tiers:
                each.num_slots = len(each.sequences)
        tier.num_slots += min(wanted, (self.budget - self.num_allocated) // tier.capacity)

    def _arrange(self, spans: Iterable[Span] = ()) -> None:
        """Lay out the tiers and spans one after another."""
        start = 0
        for tier in self.tiers:
            tier.start = start
            start += tier.num_slots * tier.capacity
        for span in spans:
            span.start = start
            start += span.num_tokens

    def _moved(self, before: Mapping[Sequence | Span, Range | None]) -> None:
        """Copy keys and values to where they now belong, and fill the rest of the slots with zeros. `before`:
        where they are; None: nowhere."""
        self.num_changes += 1
        ranges = [(was, self.range_of(each)) for each, was in before.items()]
        moves = [
            (was, now) for was, now in ranges if was is None or (was.start, was[2]) != (now.start, now[2])
        ]
        if not moves:
            return
        size, end = self.size, max(now.start + now.capacity for _, now in moves)
        if end > size:
            size = max(end, min(self.budget, size * 3 // 2))
        for index, piece in enumerate(self.pieces):
            if len(piece) <= size:
                self.pieces[index] = piece.new_empty(size + 1, *piece.shape[1:])
                self.pieces[index][: len(piece) - 1] = piece[:-1]
                piece = self.pieces[index]
            _copy(piece, moves)


def _copy(piece: Tensor, moves: Iterable[tuple[Range | None, Range]]) -> None:
    """Move ranges of a piece at the same time, and fill what they do not use with zeros."""
    taken = [(piece[was.start : was.start + now.used].clone() if was else None, now) for was, now in moves]
    for rows, (start, used, capacity) in taken:
        if rows is not None:
            piece[start : start + used] = rows
        if rows is None or used < capacity:
            piece[start + (0 if rows is None else used) : start + capacity] = 0


def capacities(max_tokens: int) -> list[int]:
    """The capacities of the tiers: growing geometrically, the last one exactly `max_tokens`."""
    sizes, size = [], float(SMALLEST)
    while size < max_tokens:
        sizes.append(int(size))
        size *= GROWTH
    return [*sizes, max_tokens]
