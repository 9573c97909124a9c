"""Reports which task waits for what when no optimizer step comes, and ends the run after a long time."""

import asyncio
import faulthandler
from functools import partial

from tailrace import clock
from tailrace.errors import Stuck
from tailrace.record.events import ControllerLag, Recorder, Waiting

END_S, LONGEST_S = 600.0, 1e9
"""Seconds in which a run must end after an error or its last round, and the longest limit of a thread."""


class Watchdog:
    """Waits for the next optimizer step, beside the schedule."""

    def __init__(self, recorder: Recorder, warning_timeout_s: float, timeout_s: float) -> None:
        self._recorder, self._warning_timeout_s, self._timeout_s = recorder, warning_timeout_s, timeout_s
        self._stepped = asyncio.Event()

    def stepped(self) -> None:
        """The optimizer has made a step."""
        self._stepped.set()

    async def watch(self) -> None:
        """Watch until cancelled. Raises a Stuck if no step came for `run.step_timeout_s`."""
        quiet_s = 0.0
        while True:
            wait_s = min(self._warning_timeout_s, self._timeout_s - quiet_s)
            try:
                async with asyncio.timeout(wait_s):
                    await self._stepped.wait()
                self._stepped.clear()
                quiet_s = 0.0
            except TimeoutError:
                quiet_s += wait_s
                self._recorder.emit(Waiting(clock.now(), quiet_s, clock.who_waits()))
                if quiet_s >= self._timeout_s:
                    raise Stuck(f"no optimizer step for {quiet_s:.0f} s: {clock.who_waits()}") from None


async def end_at_last(timeout_s: float) -> None:
    """Let this process end, and its workers with it, if its loop hangs for `run.step_timeout_s`, or if it
    lives for `END_S` after this was cancelled: what the run waits for cannot be cancelled. Then the stacks of
    all threads are printed. For live runs."""
    end = partial(faulthandler.dump_traceback_later, exit=True, file=2)
    try:
        while True:
            end(END_S + min(timeout_s, LONGEST_S))
            await asyncio.sleep(END_S / 60)
    finally:
        end(END_S)


async def watch_controller_lag(recorder: Recorder, every_s: float = 0.5) -> None:
    """Record how late the controller's loop runs, until cancelled. For live runs: virtual time has no lag."""
    while True:
        due_s = clock.now() + every_s
        await asyncio.sleep(every_s)
        recorder.emit(ControllerLag(clock.now(), clock.now() - due_s))
