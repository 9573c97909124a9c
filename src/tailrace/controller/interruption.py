"""Ends a run in order when a signal, another thread or its budget asks for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from signal import Signals


class Interruption:
    """Cancels the task of a run once it is requested, but never inside an optimizer step or a checkpoint.

    Such a part is `protected`: the trainer and the ledger change together. A request that comes meanwhile
    takes effect at the end of the part.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """Number of the signal that was received; None: no interruption was requested."""
        self.is_complete = False
        """The schedule is stopped because a round that an earlier life began has all its steps."""
        self.reason = self.limit = ""
        """Why the run ends itself early, in words, and the key of the setting reached; empty: it does not."""
        self.on_request: Callable[[], None] = lambda: None
        """Called in the run's loop when a signal or another thread asks for the end."""
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_protected = 0

    @property
    def name(self) -> str:
        """Name of the signal that was received."""
        return Signals(self.signal or 0).name

    def begin(self) -> None:
        """The calling task is the one to cancel. A request that came before is carried out at once."""
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self.is_complete, self.reason = False, ""  # of an earlier life or round
        if self.signal is not None:
            self._cancel()

    def end(self) -> None:
        """The run is complete, or it is being interrupted: later requests change nothing."""
        self._task = None

    def request(self, signal: int) -> None:
        """Ask for the interruption, from a signal handler or from any thread."""
        self.signal = signal
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._requested)

    def complete(self) -> None:
        """Stop the schedule: a round that an earlier life began has all its steps."""
        self.is_complete = True
        self._cancel()

    def stop(self, reason: str, limit: str) -> None:
        """The run must not go on, for a reason in words. `limit`: the key of the setting that is reached."""
        self.reason, self.limit = reason, limit
        self._cancel()

    @asynccontextmanager
    async def protected(self) -> AsyncIterator[None]:
        """The block is carried out to its end, or not begun if a request is about to take effect."""
        if (task := asyncio.current_task()) and task.cancelling():
            await asyncio.sleep(0)
        self._num_protected += 1
        try:
            yield
        finally:
            self._num_protected -= 1
            if self.signal is not None or self.reason:
                self._cancel()

    def _requested(self) -> None:
        self.on_request()
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None and not self._num_protected:
            self._task.cancel()
            self._task = None  # a second cancellation would interrupt the orderly end
