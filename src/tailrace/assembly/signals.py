"""Signals that end the process: the first one in order, the second one at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = "\x1b[?25h"


class Terminated(KeyboardInterrupt):
    """A signal came while nothing had to be saved. No `except Exception` stops it."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def terminate(signal: int) -> None:
    """Leave what the main thread does, by raising Terminated."""
    raise Terminated(signal)


@contextmanager
def signals_received(first: Callable[[int], None]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP inside the block. Outside of the main thread nothing changes.

    SIGHUP stays ignored where it is: nohup has done that. Worker processes end by themselves when this
    process ends, so the second signal may end it at once.

    Args:
        first: called with the number of the first signal, in the main thread between two bytecodes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if received:
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())  # a live display hides it
            os._exit(128 + number)
        received.append(number)
        first(number)

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
