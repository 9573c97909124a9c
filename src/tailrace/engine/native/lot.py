"""The parking lot: what the cache held of requests that were aborted, should they come again.

A partial rollout that goes on after a publication would else compute its whole context anew. Parked blocks
live in what the cache's budget leaves free, and the oldest give way to whoever runs.
"""

from tailrace.engine.native.cache import Block, Response


class Lot:
    """Blocks by request, the oldest first."""

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[list[int], Block]] = {}
        self.num_tokens = 0
        """Positions of all blocks."""

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, response: Response, block: Block, room: int) -> None:
        """Keep a copy of the block, which holds all tokens but the last, if it fits into `room` positions
        beside what is kept already, or instead of the oldest of it."""
        context = response.tokens[:-1]
        self.make_room(room - len(context))
        if len(context) <= room:
            self._blocks[response.id] = context, Block(block.keys.clone(), block.values.clone())
            self.num_tokens += len(context)

    def take(self, response: Response) -> Block | None:
        """What it left here, if it comes back with the same tokens."""
        context, block = self._blocks.pop(response.id, ([], None))
        self.num_tokens -= len(context)
        return block if context == response.tokens[:-1] else None

    def make_room(self, room: int) -> None:
        """Forget the oldest until no more than `room` positions are kept."""
        while self._blocks and self.num_tokens > room:
            context, _ = self._blocks.pop(next(iter(self._blocks)))
            self.num_tokens -= len(context)
