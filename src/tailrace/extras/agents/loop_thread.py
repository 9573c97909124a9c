"""An event loop in a thread of its own, for code of users that may compute for long."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from tailrace.clock import RealTimeLoop, ended

T = TypeVar("T")

STOP_S = 5.0
"""Seconds in which what is stopped must end; what does not is left alone."""


class LoopThread:
    """Runs coroutines in another thread. The thread starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine in the thread. A cancelled call cancels the coroutine, and ends after it."""
        loop = self._started()
        done: Future[asyncio.Task[T]] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(done.set_result)

        loop.call_soon_threadsafe(begin)
        here = asyncio.wrap_future(done)
        try:
            await asyncio.wait([here])
        except asyncio.CancelledError:
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await ended(here)
            raise
        return here.result().result()

    @asynccontextmanager
    async def entered(self, context: AbstractAsyncContextManager[object]) -> AsyncIterator[None]:
        """Keep a context open in the thread, in one task there, for the length of the block."""
        is_open: Future[None] = Future()
        closing = asyncio.Event()

        async def hold() -> None:
            async with context:
                is_open.set_result(None)
                await closing.wait()

        holding = asyncio.create_task(self.run(hold()))
        opened = asyncio.wrap_future(is_open)
        try:
            await asyncio.wait([holding, opened], return_when=asyncio.FIRST_COMPLETED)
            if not holding.done():
                yield
        finally:
            self._started().call_soon_threadsafe(closing.set)
            await holding

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        if self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(2 * STOP_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = loop = RealTimeLoop()
            self._thread = threading.Thread(target=self._work, args=[loop], name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    @staticmethod
    def _work(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.close()

    @staticmethod
    async def _stop() -> None:
        loop = asyncio.get_running_loop()
        try:
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.wait(others, timeout=STOP_S)
            await loop.shutdown_asyncgens()
        finally:
            loop.stop()
