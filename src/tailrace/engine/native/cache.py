"""The KV cache: a sequence occupies a slot in the smallest tier that holds its tokens.

A sequence that outgrows its tier is copied to the next one. Capacities grow geometrically, so the lengths
within a tier are alike and attention over a tier computes little padding. Allocated positions, and those of
suspended blocks, never exceed the budget together.

Suffixes: L layers, S slots, K key-value heads, C capacity, N positions, D head dimension.
"""

from itertools import chain

from torch import Tensor

from tailrace.engine.native.sequence import Block, Sequence

SMALLEST = 80
GROWTH = 1.6


class Tier:
    """Sequences whose lengths are alike, in slots of one contiguous tensor.

    The sequences occupy the slots [0, n): when one leaves, the last one moves into its slot. All positions of
    an occupied slot are finite, because attention multiplies those beyond the length by zero.

    Args:
        empty: [L, 0, K, 0, D], of the cache's device and type.
        capacity: positions of a slot.
    """

    def __init__(self, empty: Tensor, capacity: int) -> None:
        self.capacity = capacity
        self.sequences: list[Sequence] = []
        layers, _, heads, _, dim = empty.shape
        self.keys = self.values = empty.new_empty(layers, 0, heads, capacity, dim)
        """[L, S, K, C, D], each."""

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    def resize(self, num_slots: int) -> None:
        """Allocate exactly `num_slots`, at least as many as are occupied."""
        kept = len(self.sequences)
        assert num_slots >= kept, (num_slots, kept)
        layers, _, *slot = self.keys.shape
        keys, values = (self.keys.new_empty(layers, num_slots, *slot) for _ in range(2))
        keys[:, :kept], values[:, :kept] = self.keys[:, :kept], self.values[:, :kept]
        self.keys, self.values = keys, values

    def write(self, sequence: Sequence, block: Block) -> None:
        """Fill the sequence's slot from position 0, and the rest of it with zeros."""
        slot, num_tokens = self.sequences.index(sequence), block.keys.shape[2]
        for cached, new in ((self.keys, block.keys), (self.values, block.values)):
            cached[:, slot, :, :num_tokens] = new
            cached[:, slot, :, num_tokens:] = 0

    def read(self, sequence: Sequence, num_tokens: int) -> Block:
        """A view of the sequence's first positions."""
        slot = self.sequences.index(sequence)
        return Block(self.keys[:, slot, :, :num_tokens], self.values[:, slot, :, :num_tokens])

    def remove(self, sequence: Sequence) -> None:
        """Free the sequence's slot."""
        slot = self.sequences.index(sequence)
        last = self.sequences.pop()
        if last is not sequence:
            self.sequences[slot] = last
            for cached in (self.keys, self.values):
                cached[:, slot] = cached[:, len(self.sequences)]


class SuspendedKV:
    """Keys and values of aborted requests, by request id, the oldest first.

    A partial rollout that is resumed would otherwise compute its whole context again.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[list[int], Block]] = {}
        self.num_tokens = 0
        """Positions of all blocks."""

    def put(self, sequence: Sequence, block: Block, room: int) -> None:
        """Keep a copy of the block of the sequence's context.

        Args:
            room: positions that all suspended blocks may take. The oldest blocks are dropped for the new one;
                a block that is larger than the room is not kept.
        """
        context = sequence.context
        self.shrink(room - len(context))
        if len(context) <= room:
            self._blocks[sequence.id] = context, block.clone()
            self.num_tokens += len(context)

    def take(self, sequence: Sequence) -> Block | None:
        """Remove and return the request's block; None if there is none or its context is another one."""
        context, block = self._blocks.pop(sequence.id, ([], None))
        self.num_tokens -= len(context)
        return block if context == sequence.context else None

    def shrink(self, num_tokens: int) -> None:
        """Drop the oldest blocks until at most `num_tokens` positions are kept."""
        while self._blocks and self.num_tokens > num_tokens:
            context, _ = self._blocks.pop(next(iter(self._blocks)))
            self.num_tokens -= len(context)


class Cache:
    """All tiers.

    Args:
        empty: as of Tier.
        max_tokens: the longest sequence, at most the budget.
        budget: positions that may be allocated.
    """

    def __init__(self, empty: Tensor, *, max_tokens: int, budget: int) -> None:
        self.budget = budget
        self.tiers = [Tier(empty, capacity) for capacity in capacities(max_tokens)]
        self.suspended = SuspendedKV()
        self._tier_of: dict[Sequence, Tier] = {}

    @property
    def num_occupied(self) -> int:
        """Positions of the occupied slots."""
        return sum(len(tier.sequences) * tier.capacity for tier in self.tiers)

    @property
    def num_allocated(self) -> int:
        """Positions of all slots."""
        return sum(tier.num_slots * tier.capacity for tier in self.tiers)

    def sequences(self) -> list[Sequence]:
        """All sequences, by tier and slot: the rows of a decode step."""
        return list(chain.from_iterable(tier.sequences for tier in self.tiers))

    def fits(self, sequence: Sequence) -> bool:
        """Whether the slot that the sequence has is large enough for its tokens."""
        return len(sequence.tokens) <= self._tier_of[sequence].capacity

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a slot for the sequence's tokens fits into the budget, in place of the slot it has."""
        tier = self._tier_of.get(sequence)
        held = tier.capacity if tier else 0
        return self.num_occupied - held + self._smallest_tier(sequence).capacity <= self.budget

    def add(self, sequence: Sequence) -> None:
        """Give the sequence a slot. The content of the slot is undefined until `write`, which must follow."""
        tier = self._smallest_tier(sequence)
        if len(tier.sequences) == tier.num_slots:
            self._enlarge(tier)
        tier.sequences.append(sequence)
        self._tier_of[sequence] = tier

    def remove(self, sequence: Sequence) -> None:
        """Free the sequence's slot."""
        self._tier_of.pop(sequence).remove(sequence)

    def move(self, sequence: Sequence) -> None:
        """Copy the sequence to the tier that its tokens need."""
        block = self.read(sequence, len(sequence.tokens) - 1).clone()
        self.remove(sequence)
        self.add(sequence)
        self.write(sequence, block)

    def release(self) -> None:
        """Free the memory of an empty cache."""
        self.suspended.shrink(0)
        for tier in self.tiers:
            tier.resize(0)

    def suspend(self, sequence: Sequence) -> None:
        """Keep what the cache holds of a sequence that is about to be removed, where the budget has room."""
        block = self.read(sequence, len(sequence.tokens) - 1)
        self.suspended.put(sequence, block, self.budget - self.num_allocated)

    def write(self, sequence: Sequence, block: Block) -> None:
        """Fill the sequence's slot from position 0."""
        self._tier_of[sequence].write(sequence, block)

    def read(self, sequence: Sequence, num_tokens: int) -> Block:
        """A view of the sequence's first positions."""
        return self._tier_of[sequence].read(sequence, num_tokens)

    def _smallest_tier(self, sequence: Sequence) -> Tier:
        return next(tier for tier in self.tiers if tier.capacity >= len(sequence.tokens))

    def _enlarge(self, tier: Tier) -> None:
        """Double the slots of a full tier as far as the budget allows; `has_room` guarantees one slot.

        Suspended blocks are dropped for it first, then other tiers give up their free slots.
        """
        wanted = max(4, tier.num_slots)
        self.suspended.shrink(self.budget - self.num_allocated - wanted * tier.capacity)
        if self.budget - self.num_allocated < tier.capacity:
            for other in self.tiers:
                if other.num_slots > len(other.sequences):
                    other.resize(len(other.sequences))
        affordable = (self.budget - self.num_allocated) // tier.capacity
        tier.resize(tier.num_slots + min(wanted, affordable))


def capacities(max_tokens: int) -> list[int]:
    """The capacities of the tiers: growing geometrically, the last one exactly `max_tokens`."""
    sizes, size = [], float(SMALLEST)
    while size < max_tokens:
        sizes.append(int(size))
        size *= GROWTH
    return [*sizes, max_tokens]
