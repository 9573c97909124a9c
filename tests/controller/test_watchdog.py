"""What ends a run that hangs and cannot be cancelled."""

import subprocess
import sys

import pytest

HANGS = """
import asyncio, faulthandler, time
from tailrace import clock
from tailrace.controller import watchdog

async def main():
    watchdog.END_S = 0.2
    last = asyncio.create_task(watchdog.end_at_last(0.2))
    await asyncio.sleep(0.5)
    {hang}
    faulthandler.cancel_dump_traceback_later()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("hang", "outcome"),
    [
        ("time.sleep(600)", (1, True)),
        ("last.cancel(); await clock.ended(asyncio.ensure_future(asyncio.sleep(600)))", (1, True)),
        ("last.cancel(); await asyncio.sleep(0)", (0, False)),
    ],
    ids=["a loop that hangs", "a task that cannot be cancelled", "a run that has ended"],
)
def test_a_run_that_goes_on_after_its_end_ends_with_its_stacks(hang: str, outcome: tuple[int, bool]) -> None:
    words = [sys.executable, "-c", HANGS.format(hang=hang)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, "Timeout (0:00:00." in done.stderr) == outcome
