"""A policy that says what a script says, and an episode over it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tailrace.contracts.environments import Completion, EpisodeOver, Message
from tailrace.types import SampleId


class ScriptedPolicy:
    """`Policy` (base.py). What it is told is in `heard`.

    Args:
        turns: the texts of its turns; after the last there is no room for more.
    """

    def __init__(self, *turns: str) -> None:
        self.id = SampleId(3, 0, 1)
        self.heard: list[Message] = []
        self._turns = list(turns)

    async def complete(self, messages: Sequence[Message] = ()) -> Completion:
        self.heard += messages
        await asyncio.sleep(0)
        if not self._turns:
            raise EpisodeOver
        text = self._turns.pop(0)
        return Completion(text, "stop", len(text))

    async def call(self, action: Callable[[], Awaitable[str]]) -> str:
        return await action()
