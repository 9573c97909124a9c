"""Live or virtual time. This is the only file that knows which of them a run uses.

`run(main, virtual=True)` drives unchanged asyncio code on a loop whose clock jumps to the next timer
whenever every task waits. Timers with equal times fire in the order they were set (stock asyncio
does not do that), so a simulated run replays exactly. Tasks wait for one another through `Signal`. Each wait
says what it waits for, so a run that makes no progress can name the reason.

The loop uses four private members of asyncio (`_selector`, `_scheduled`, `_when`, `_clock_resolution`), as
SimPy-like loops for asyncio must; the tests of this file fail if an interpreter changes them.
"""

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from tailrace.errors import Stuck

T = TypeVar("T")


def now() -> float:
    """Seconds on the running loop's clock: virtual or monotonic."""
    return asyncio.get_running_loop().time()


def wall_time() -> float:
    """Unix seconds; in virtual time, virtual seconds."""
    loop = asyncio.get_running_loop()
    return loop.time() if isinstance(loop, VirtualTimeLoop) else time.time()  # noqa: TID251


def run(main: Coroutine[Any, Any, T], *, virtual: bool) -> T:
    """Run a coroutine to its end, in virtual or in real time.

    Raises:
        Stuck: in virtual time, when every task waits and no timer is set.
    """
    waits.clear()
    with asyncio.Runner(loop_factory=VirtualTimeLoop if virtual else RealTimeLoop) as runner:
        try:
            return runner.run(main if virtual else _without_exit(main))
        except _Exited as exited:
            raise SystemExit(*exited.args) from exited


class RealTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in which `sys.exit()` ends the task that calls it, as every other exception does, and
    raises where the task is awaited. In a stock loop it ends the loop, too."""

    def run_forever(self) -> None:
        while True:
            with suppress(SystemExit):
                return super().run_forever()


class _Exited(Exception):
    """The main task has called `sys.exit()`, with these arguments."""


async def _without_exit(main: Coroutine[Any, Any, T]) -> T:
    """Await the main task. asyncio expects that an exit stops the loop."""
    try:
        return await main
    except SystemExit as why:
        raise _Exited(*why.args) from why


class _Timer(asyncio.TimerHandle):
    __slots__ = ("order",)
    order: int

    def __lt__(self, other: Any) -> bool:
        mine: tuple[float, int] = (self._when, self.order)  # type: ignore[attr-defined]
        return mine < (other._when, other.order)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose clock jumps to the next timer when every task waits."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._orders = itertools.count()
        poll = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> list[Any]:
            ready: list[Any] = poll(0)
            if ready:
                return ready
            if timeout is None:
                raise Stuck(f"t = {self._now:.3f} s: every task waits: {who_waits()}")
            if timeout > 0:
                # The timer's own time, not now + timeout: no rounding comes between them.
                when: float = self._scheduled[0]._when  # type: ignore[attr-defined]
                self._now = max(self._now, when)
                # asyncio fires what is due before now + resolution; late in a run, a constant would vanish.
                self._clock_resolution = math.ulp(self._now)
            return ready

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.order = next(self._orders)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer


waits: dict[int, str] = {}
"""What each waiting task waits for, in the order in which the waits began."""
_wait_ids = itertools.count()


def who_waits() -> str:
    """The open waits in one line, for the watchdog, the display or an error."""
    return "; ".join(dict.fromkeys(waits.values())) or "no wait is named"


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """The block inside waits for `what`."""
    key = next(_wait_ids)
    waits[key] = what
    try:
        yield
    finally:
        del waits[key]


class Signal:
    """Wakes all waiting tasks, in the order in which they began to wait.

    A caller checks its condition and then waits, without an await in between. Then no wake-up is lost.
    """

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    async def wait(self, what: str) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        with waiting(what):
            await future
