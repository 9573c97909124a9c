"""Signals that end the process: the first one in order, a later SIGINT or SIGHUP at once.

A later SIGTERM changes nothing: clusters repeat it at the end of the grace time, while the process may still
save, and end with SIGKILL.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 1.0
"""A signal so soon after the first one is the same request: launchers pass on what the process group gets."""
_SHOW_CURSOR = "\x1b[?25h"


class Terminated(KeyboardInterrupt):
    """A signal came while nothing had to be saved. No `except Exception` stops it."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def terminate(signal: int) -> None:
    """Leave what the main thread does, by raising Terminated. A loop that runs raises it between two of its
    callbacks: inside of one a task that is woken could be lost, and the others would wait for it."""
    if not _in_loop(_terminate, signal):
        _terminate(signal)


def _terminate(signal: int) -> None:
    raise Terminated(signal)


def _in_loop(function: Callable[..., None], *args: object) -> bool:
    """Let the loop that runs call a function between two of its callbacks. Returns whether one runs."""
    running = getattr(sys.modules.get("asyncio"), "_get_running_loop", lambda: None)
    if loop := running():
        loop.call_soon_threadsafe(function, *args)
    return loop is not None


@contextmanager
def signals_awaited() -> Iterator[Callable[[], None]]:
    """Inside the block the first signal raises Terminated where the yielded function is called next, or
    between two callbacks of a loop. What a handler raises while an object is freed Python drops."""
    received: list[int] = []

    def check() -> None:
        if received:
            raise Terminated(received[0])

    def first(number: int) -> None:
        received.append(number)
        _in_loop(check)

    with signals_received(first):
        yield check


@contextmanager
def signals_received(first: Callable[[int], None], at_once: str = "ended at once") -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP inside the block. Outside of the main thread nothing changes.

    SIGHUP stays ignored where it is: nohup has done that. Worker processes end by themselves when this
    process ends, so a later signal may end it at once.

    Args:
        first: called with the number of the first signal, in the main thread between two bytecodes.
        at_once: what is said when a later signal ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received_s: list[float] = []

    def handle(number: int, _: FrameType | None) -> None:
        received_s.append(time.monotonic())
        if len(received_s) == 1:
            first(number)
        elif number != signal.SIGTERM and received_s[-1] - received_s[0] > SAME_S:
            with suppress(OSError):
                show = _SHOW_CURSOR if os.isatty(2) else ""  # a live display hides it
                os.write(2, f"{show}tailrace: {signal.Signals(number).name} again: {at_once}\n".encode())
            os._exit(128 + number)

    before = {
        each: signal.signal(each, handle)
        for each in SIGNALS
        if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
