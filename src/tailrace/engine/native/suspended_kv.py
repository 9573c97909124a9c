"""Keys and values of aborted requests that may be submitted again.

A partial rollout that is resumed would otherwise compute its whole context again.
"""

from tailrace.engine.native.sequence import Block, Sequence


class SuspendedKV:
    """Blocks by request id, the oldest first."""

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
