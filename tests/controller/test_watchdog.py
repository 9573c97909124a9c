"""What ends a run that hangs and cannot be cancelled."""

import subprocess
import sys

HANGS = """
import asyncio, faulthandler, time
from tailrace import clock
from tailrace.controller import watchdog

async def main():
    watchdog.END_S = 0.2
    last = asyncio.create_task(watchdog.end_at_last(0.2))
    await asyncio.sleep(1)
    {hang}
    faulthandler.cancel_dump_traceback_later()

asyncio.run(main())
"""


def outcome(hang: str) -> tuple[int, bool]:
    words = [sys.executable, "-c", HANGS.format(hang=hang)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, "Timeout (0:00:00." in done.stderr


def test_a_run_whose_loop_hangs_ends_with_its_stacks() -> None:
    assert outcome("time.sleep(600)") == (1, True)


def test_a_run_that_cannot_be_cancelled_ends_too() -> None:
    assert outcome("last.cancel(); await clock.ended(asyncio.ensure_future(asyncio.sleep(600)))") == (1, True)


def test_a_run_that_has_ended_is_left_alone() -> None:
    assert outcome("last.cancel(); await asyncio.sleep(0)") == (0, False)
