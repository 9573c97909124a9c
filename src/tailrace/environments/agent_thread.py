"""The thread of async agents. What they compute or block on does not stop the controller's loop."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from tailrace.clock import RealTimeLoop

STOP_S = 5.0
"""Seconds in which agents that are cancelled must end."""


class AgentThread:
    """An event loop in a thread of its own, which starts with the first coroutine."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="agents", daemon=True)

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Await a coroutine in the thread. Cancelling the call cancels it there and does not wait for it."""
        if self._loop is None:
            self._loop = RealTimeLoop()
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        if self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(2 * STOP_S)

    def _work(self) -> None:
        assert self._loop
        self._loop.run_forever()
        self._loop.close()

    async def _stop(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.wait(others, timeout=STOP_S)
            await loop.shutdown_asyncgens()
        finally:
            loop.stop()
