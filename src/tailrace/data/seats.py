"""What an environment of verifiers asks of its agents first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class _Asked(Exception):
    """Ends the run of an environment at its first request to an agent."""


class Seats:
    """Takes the place of the agents of an environment. Each notes the first request and ends the run."""

    def __init__(self) -> None:
        self.asked: tuple[str, Any, object] | None = None
        """Agent, task and first message."""

    def __getattr__(self, name: str) -> "_Seat":
        seat = self.__dict__[name] = _Seat(partial(self._note, name))
        return seat

    def _note(self, name: str, task: Any, message: object) -> None:
        self.asked = self.asked or (name, task, message)
        raise _Asked


class _Seat:
    trainable = True

    def __init__(self, note: Callable[[Any, object], None]) -> None:
        self._note = note

    async def run(self, task: Any, **_: object) -> None:
        self._note(task, None)

    @asynccontextmanager
    async def interaction(self, task: Any, **_: object) -> AsyncIterator["_Line"]:
        yield _Line(partial(self._note, task))


class _Line:
    def __init__(self, note: Callable[[object], None]) -> None:
        self._note = note

    async def turn(self, message: object = None) -> None:
        self._note(message)


def run_elsewhere(coroutine: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine to its end in a thread with an event loop of its own: the caller may be in a loop."""

    async def call() -> T:
        return await coroutine()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(call())).result()
