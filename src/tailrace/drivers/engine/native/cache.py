"""The KV cache: a sequence occupies a slot in the smallest tier that holds its tokens.

A sequence that outgrows its tier is copied to the next one. Capacities grow geometrically, so the lengths
within a tier are alike and attention over a tier computes little padding. Allocated positions, and those of
suspended blocks, never exceed the budget together. The keys of each layer are a tensor of their own, a piece,
and so are its values. What grows or moves does so piece by piece: only of one piece both old and new exist.

Suffixes: S slots, K key-value heads, C capacity, N positions, D head dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from tailrace.types import SamplingParams

SMALLEST = 80
GROWTH = 1.6

Block = list[Tensor]
"""Keys and values of the first N positions, [K, N, D] each, layer after layer."""


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

    @property
    def num_completion(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def context(self) -> list[int]:
        """All tokens but the last, which is the input of the next decode step."""
        return self.tokens[:-1]


class Tier:
    """Sequences whose lengths are alike, in slots of contiguous tensors.

    The sequences occupy the slots [0, n): when one leaves, the last one moves into its slot. All positions of
    an occupied slot are finite, because attention multiplies those beyond the length by zero.

    Args:
        empty: [layers, 0, K, 0, D], of the cache's device and type.
        capacity: positions of a slot.
    """

    def __init__(self, empty: Tensor, capacity: int) -> None:
        self.capacity = capacity
        self.sequences: list[Sequence] = []
        layers, _, heads, _, dim = empty.shape
        self.pieces = [empty.new_empty(0, heads, capacity, dim) for _ in range(2 * layers)]
        """[S, K, C, D] each: keys and values of the first layer, of the second, and so on."""

    @property
    def num_slots(self) -> int:
        return len(self.pieces[0])

    def resize(self, index: int, num_slots: int) -> None:
        """Allocate exactly `num_slots` of a piece, at least as many as are occupied."""
        old = self.pieces[index]
        new = old.new_empty(num_slots, *old.shape[1:])
        kept = min(len(old), num_slots)
        new[:kept] = old[:kept]
        self.pieces[index] = new

    def write(self, index: int, slot: int, piece: Tensor) -> None:
        """Fill a piece of a slot from position 0, and the rest of it with zeros."""
        cached, num_tokens = self.pieces[index][slot], piece.shape[1]
        cached[:, :num_tokens] = piece
        cached[:, num_tokens:] = 0

    def read(self, sequence: Sequence, num_tokens: int) -> Block:
        """Views of the sequence's first positions."""
        slot = self.sequences.index(sequence)
        return [piece[slot, :, :num_tokens] for piece in self.pieces]

    def remove(self, sequence: Sequence, num_tokens: int = 0) -> Iterator[Tensor]:
        """Free the sequence's slot. Yield copies of its first positions; the iterator frees each piece."""
        slot = self.sequences.index(sequence)
        last = self.sequences.pop()
        if last is not sequence:
            self.sequences[slot] = last
        return self._remove(slot, len(self.sequences), num_tokens)

    def _remove(self, slot: int, last: int, num_tokens: int) -> Iterator[Tensor]:
        for index in range(len(self.pieces)):
            taken = self.pieces[index][slot, :, :num_tokens].clone()
            if slot != last:
                self.pieces[index][slot] = self.pieces[index][last]
            yield taken


class SuspendedKV:
    """Keys and values of aborted requests, by request id, the oldest first.

    A partial rollout that is resumed would otherwise compute its whole context again.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[list[int], int | None, Block]] = {}
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
            self._blocks[sequence.id] = context, sequence.pin, [piece.clone() for piece in block]
            self.num_tokens += len(context)

    def take(self, sequence: Sequence) -> Block | None:
        """Remove and return the request's block; None if there is none or its context or pin is another."""
        context, pin, block = self._blocks.pop(sequence.id, ([], None, None))
        self.num_tokens -= len(context)
        return block if (context, pin) == (sequence.context, sequence.pin) else None

    def shrink(self, num_tokens: int) -> None:
        """Drop the oldest blocks until at most `num_tokens` positions are kept."""
        while self._blocks and self.num_tokens > num_tokens:
            context, *_ = self._blocks.pop(next(iter(self._blocks)))
            self.num_tokens -= len(context)


class Cache:
    """All tiers.

    Args:
        empty: as of Tier.
        max_tokens: the longest sequence, at most the budget.
        budget: positions that may be allocated.
    """

    lends_prompts = True
    """Whether a prompt may be copied from a running sequence."""

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
        self._place(sequence, iter(()))

    def resume(self, sequence: Sequence) -> bool:
        """Give the sequence a slot with its suspended block; whether there is one."""
        block = self.suspended.take(sequence)
        if block is not None:
            self._place(sequence, (block.pop(0) for _ in range(len(block))))
        return block is not None

    def remove(self, sequence: Sequence) -> None:
        """Free the sequence's slot."""
        for _ in self._tier_of.pop(sequence).remove(sequence):
            pass

    def move(self, sequence: Sequence) -> None:
        """Copy the sequence to the tier that its tokens need."""
        self._place(sequence, self._tier_of[sequence].remove(sequence, len(sequence.tokens) - 1))

    def release(self) -> None:
        """Free the memory of an empty cache."""
        self.suspended.shrink(0)
        for tier in self.tiers:
            for index in range(len(tier.pieces)):
                tier.resize(index, 0)

    def suspend(self, sequence: Sequence) -> None:
        """Keep what the cache holds of a sequence that is about to be removed, where the budget has room."""
        block = self.read(sequence, len(sequence.tokens) - 1)
        self.suspended.put(sequence, block, self.budget - self.num_allocated)

    def write(self, sequence: Sequence, block: Block) -> None:
        """Fill the sequence's slot from position 0."""
        tier = self._tier_of[sequence]
        slot = tier.sequences.index(sequence)
        for index, piece in enumerate(block):
            tier.write(index, slot, piece)

    def read(self, sequence: Sequence, num_tokens: int) -> Block:
        """Views of the sequence's first positions."""
        return self._tier_of[sequence].read(sequence, num_tokens)

    def _smallest_tier(self, sequence: Sequence) -> Tier:
        return next(tier for tier in self.tiers if tier.capacity >= len(sequence.tokens))

    def _place(self, sequence: Sequence, pieces: Iterator[Tensor]) -> None:
        """Give the sequence a slot and fill it with pieces, or leave it unfilled without them."""
        tier = self._smallest_tier(sequence)
        sizes = self._enlarged(tier) if len(tier.sequences) == tier.num_slots else {}
        slot = len(tier.sequences)
        tier.sequences.append(sequence)
        self._tier_of[sequence] = tier
        for index in range(len(tier.pieces)):
            piece = next(pieces, None)
            for each, num_slots in sizes.items():
                each.resize(index, num_slots)
            if piece is not None:
                tier.write(index, slot, piece)

    def _enlarged(self, tier: Tier) -> dict[Tier, int]:
        """The new sizes with which a full tier has twice its slots, as far as the budget allows; `has_room`
        guarantees one more.

        Suspended blocks are dropped for it first, then other tiers give up their free slots.
        """
        wanted, sizes = max(4, tier.num_slots), {}
        self.suspended.shrink(self.budget - self.num_allocated - wanted * tier.capacity)
        room = self.budget - self.num_allocated
        if room < tier.capacity:
            sizes = {each: len(each.sequences) for each in self.tiers if each.num_slots > len(each.sequences)}
            room += sum((each.num_slots - num) * each.capacity for each, num in sizes.items())
        return sizes | {tier: tier.num_slots + min(wanted, room // tier.capacity)}


def capacities(max_tokens: int) -> list[int]:
    """The capacities of the tiers: growing geometrically, the last one exactly `max_tokens`."""
    sizes, size = [], float(SMALLEST)
    while size < max_tokens:
        sizes.append(int(size))
        size *= GROWTH
    return [*sizes, max_tokens]
