"""Live or virtual time. This is the only file that knows which of them a run uses.

`run(main, virtual=True)` drives unchanged asyncio code on a loop whose clock jumps to the next timer
whenever every task waits. Timers with equal times fire in the order they were set (stock asyncio
does not do that), so a simulated run replays exactly. Tasks wait for one another through `Signal`. Each wait
says what it waits for, so a run that makes no progress can name the reason.

The loop has a `_run_once` of its own and uses four other private members of asyncio (`_ready`, `_stopping`,
`_selector`, `_process_events`); the tests of this file fail if an interpreter changes them.
"""

import asyncio
import gc
import heapq
import itertools
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tailrace.errors import Stuck

T = TypeVar("T")

JUMPS_PER_POLL = 100
"""Jumps of virtual time between two looks at signals and sockets."""
YOUNG_OBJECTS = 50_000
"""New objects between two collections of cyclic garbage in virtual time."""


def now() -> float:
    """Seconds on the running loop's clock: virtual or monotonic."""
    return asyncio.get_running_loop().time()


def wall_time() -> float:
    """Unix seconds; in virtual time, virtual seconds."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # the page and its threads have no loop
        return time.time()  # noqa: TID251
    return loop.time() if isinstance(loop, VirtualTimeLoop) else time.time()  # noqa: TID251


def run(main: Coroutine[Any, Any, T], *, virtual: bool) -> T:
    """Run a coroutine to its end, in virtual or in real time. Raises a Stuck in virtual time, if every
    task waits and no timer is set."""
    held = _signals_held if virtual else nullcontext
    runner = asyncio.Runner(loop_factory=VirtualTimeLoop if virtual else RealTimeLoop)
    with closing(main), rare_collections() if virtual else nullcontext():
        try:
            with held():
                runner.get_loop()
            return runner.run(main if virtual else _without_exit(main))
        except _Exited as exited:
            raise SystemExit(*exited.args) from exited
        finally:
            with held():
                runner.close()


class RealTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in which `sys.exit()` ends the task that calls it, as every other exception does, and
    raises where the task is awaited. In a stock loop it ends the loop, too."""

    _is_stopped = False

    def run_forever(self) -> None:
        self._is_stopped = False
        while not self._is_stopped:
            with suppress(SystemExit):
                return super().run_forever()

    def stop(self) -> None:
        self._is_stopped = True  # asyncio forgets it if a task exits in the same turn of the loop
        super().stop()


class _Exited(Exception):
    """The main task has called `sys.exit()`, with these arguments."""


async def _without_exit(main: Coroutine[Any, Any, T]) -> T:
    """Await the main task. asyncio expects that an exit stops the loop."""
    try:
        return await main
    except SystemExit as why:
        raise _Exited(*why.args) from why


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold signals back, whose handlers may raise between any two bytecodes and leave a loop half made."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for cyclic garbage less often: a simulation keeps most of the objects that it makes for long."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose clock jumps to the next timer when every task waits."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap: (time, order, timer)
        self._orders, self._jumps = itertools.count(), itertools.count()

    if sys.platform == "emscripten":  # a browser has neither sockets nor signals, which would wake the loop

        def _make_self_pipe(self) -> None: ...

        def _close_self_pipe(self) -> None: ...

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._orders), timer))
        return timer

    def _run_once(self) -> None:
        """One turn of the loop, in place of asyncio's: what is ready, then the timers that are due."""
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._jump(ready)
        while self._timers and self._timers[0][0] <= self._now:
            ready.append(heapq.heappop(self._timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _jump(self, ready: Collection[asyncio.Handle]) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers or next(self._jumps) % JUMPS_PER_POLL == 0:
            self._process_events(self._selector.select(0))  # type: ignore[attr-defined]
        if ready:
            return
        if not self._timers:
            raise Stuck(f"t = {self._now:.3f} s: every task waits: {who_waits(self)}")
        self._now = max(self._now, self._timers[0][0])


_waits: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, tuple[str, float]]] = WeakKeyDictionary()
"""Open waits of each loop: what is awaited and since when, in the order in which the waits began."""
_wait_ids = itertools.count()


def who_waits(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """The open waits in one line, for the watchdog, the display or an error."""
    return "; ".join(open_waits(loop)) or "no wait is named"


def open_waits(loop: asyncio.AbstractEventLoop | None = None) -> dict[str, float]:
    """Return what tasks wait for, each with the time at which the first of them began to wait. `loop`: loop
    of the tasks; None: the running one. Other threads must name it."""
    found: dict[str, float] = {}
    for what, since_s in list(_waits.get(loop or asyncio.get_running_loop(), {}).values()):
        found.setdefault(what, since_s)
    return found


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """The block inside waits for `what`."""
    key, waits = next(_wait_ids), _waits.setdefault(asyncio.get_running_loop(), {})
    waits[key] = what, now()
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

    async def wait(self, what: str | None) -> None:
        """Wait for the signal. `what`: for messages; None: the task watches for others, which do not wait."""
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        with waiting(what) if what else nullcontext():
            await future


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Wait until tasks have ended, however often the waiting is cancelled; then raise the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled
