"""Questions and answers between the controller and one worker, whatever carries the messages.

A worker answers in the order in which it was asked. If it ends before it was asked to, every open and every
later question raises WorkerDied.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from tailrace.clock import waiting
from tailrace.errors import WorkerDied
from tailrace.workers.messages import Refused

Answer = TypeVar("Answer", bound=msgspec.Struct)


class Conversation:
    """The controller's side. A subclass carries the messages and notices the end of the worker."""

    address = "127.0.0.1"
    """Under which this host reaches the worker's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_message: Callable[[msgspec.Struct], None] = self.answer
        """Called with each message, in order. It must pass answers on to `answer`."""
        self._open: set[asyncio.Future[Any]] = set()
        self._answers: deque[asyncio.Future[msgspec.Struct]] = deque()
        self._words = asyncio.get_running_loop().create_future()
        """How the worker ended."""
        self._fault = ""
        """What the worker was aborted for."""
        self._cause: Exception | None = None
        """The defect of a message for which the worker was ended."""

    @property
    def has_ended(self) -> bool:
        return self._words.done()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            WorkerDied: the worker has ended.
        """
        if self._words.done():
            raise WorkerDied(self._words.result())
        self._write(message)

    def promise(self) -> asyncio.Future[Any]:
        """Return a future that raises WorkerDied if the worker ends first."""
        future = asyncio.get_running_loop().create_future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._words.done():
            self._fail(future)
        return future

    def next_answer(self) -> asyncio.Future[msgspec.Struct]:
        """Return a future of the next answer that no earlier caller waits for."""
        future = self.promise()
        self._answers.append(future)
        return future

    def answer(self, message: msgspec.Struct) -> None:
        """Hand an answer to the caller that asked first."""
        future = self._answers.popleft()
        if not future.done():
            future.set_result(message)

    async def ask(self, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Send a message and wait for its answer, as `answered`."""
        return await self.asked(message, kind)

    def asked(self, message: msgspec.Struct, kind: type[Answer]) -> Coroutine[Any, Any, Answer]:
        """Send a message now, and return what waits for its answer, as `answered`."""
        self.send(message)
        return self.answered(self.next_answer(), kind, type(message).__name__)

    async def answered(self, answer: asyncio.Future[msgspec.Struct], kind: type[Answer], what: str) -> Answer:
        """Wait for an answer.

        Args:
            answer: of `next_answer`.
            kind: the type of the answer.
            what: what the worker does, for diagnostics.

        Raises:
            WorkerDied: the worker ended first.
            TailraceError: the answer is an error message.
        """
        with waiting(f"{self.name}: {what}"):
            found = await answer
        if isinstance(found, Refused):
            raise found.error()
        assert isinstance(found, kind), found
        return found

    async def died(self) -> None:
        """Wait until the worker ends.

        Raises:
            WorkerDied: always; cancel this wait before an intended end.
        """
        raise WorkerDied(await self.last_words())

    async def last_words(self) -> str:
        """Wait until the worker ends. Returns how it ended."""
        words: str = await asyncio.shield(self._words)
        return words

    def log_end(self) -> str:
        """What the worker printed last, to follow in a sentence."""
        raise NotImplementedError

    def kill_group(self, leader: int) -> None:
        """Kill a process group that the worker has started on its host.

        Args:
            leader: id of the group.
        """
        raise NotImplementedError

    def kill(self) -> None:
        """End the worker at once."""
        raise NotImplementedError

    def abort(self, fault: str) -> None:
        """End the worker at once because of a fault. Its log gets the stack of each thread, where it can.

        Args:
            fault: what the worker did, to follow its name.
        """
        self._fault = fault
        self.kill()

    async def close(self) -> None:
        """Let the worker end."""
        raise NotImplementedError

    def _write(self, message: msgspec.Struct) -> None:
        raise NotImplementedError

    def _ended(self, words: str) -> None:
        """The worker has ended: every open question fails."""
        if not self._words.done():
            self._words.set_result(f"{self.name} {self._fault}; {words}" if self._fault else words)
        for future in list(self._open):
            if not future.done():
                self._fail(future)

    def _fail(self, future: asyncio.Future[Any]) -> None:
        error = WorkerDied(self._words.result())
        error.__cause__ = self._cause
        future.set_exception(error)
        future.exception()  # otherwise asyncio warns if no caller retrieves it
