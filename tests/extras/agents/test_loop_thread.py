"""Coroutines in the thread of an event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tailrace.extras.agents.loop_thread import LoopThread


async def thread_name() -> str:
    return threading.current_thread().name


async def test_a_coroutine_runs_in_the_thread_and_its_error_is_the_callers() -> None:
    async def failing() -> None:
        raise LookupError("no such page")

    thread = LoopThread("other")
    assert await thread.run(thread_name()) == "other"
    with pytest.raises(LookupError, match="no such page"):
        await thread.run(failing())
    thread.close()


async def test_a_cancelled_call_returns_after_its_coroutine_has_ended_however_often_it_is_cancelled() -> None:
    said = []
    thread, begun = LoopThread("other"), threading.Event()

    async def slow_to_end() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            said.append("ended")

    calling = asyncio.create_task(thread.run(slow_to_end()))
    while not begun.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for _ in range(3):
        calling.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert said == ["ended"]
    thread.close()


@asynccontextmanager
async def noting(said: list[str], *, broken: bool = False) -> AsyncIterator[None]:
    said.append(f"open in {await thread_name()}")
    if broken:
        raise LookupError("it cannot open")
    opened_by = asyncio.current_task()
    yield
    said.append("closed by the same task" if asyncio.current_task() is opened_by else "closed by another")


async def test_a_context_is_open_for_the_length_of_the_block_in_one_task() -> None:
    said: list[str] = []
    thread = LoopThread("other")
    async with thread.entered(noting(said)):
        said.append("block")
    with pytest.raises(LookupError, match="it cannot open"):
        async with thread.entered(noting(said, broken=True)):
            said.append("no block")
    thread.close()
    assert said == ["open in other", "block", "closed by the same task", "open in other"]
