"""What the first signal, its repetition, and a later one do to a process that waits."""

import asyncio
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from signal import SIGHUP, SIGINT, SIGTERM
from types import FrameType

import pytest

from tailrace import clock
from tailrace.drivers.assembly.signals import Terminated, signals_awaited, signals_received, terminate

WAITS = """
import sys, time
from tailrace.drivers.assembly import signals

signals.SAME_S = float(sys.argv[1])
signals.signal.signal(signals.signal.SIGHUP, signals.signal.SIG_DFL)  # the tests may run under nohup
with signals.signals_received(lambda number: print("first", number, flush=True), "all is lost"):
    print("waits", flush=True)
    for line in sys.stdin:
        print(line, end="", flush=True)
"""


@pytest.mark.parametrize(
    ("same_s", "sent", "said", "code"),
    [
        (0.0, (SIGINT, SIGHUP), "tailrace: SIGHUP again: all is lost\n", 129),
        (0.0, (SIGTERM, SIGINT), "tailrace: SIGINT again: all is lost\n", 130),
        (0.0, (SIGINT, SIGTERM), "", 0),
        (60.0, (SIGINT, SIGINT), "", 0),
    ],
    ids=["SIGHUP after SIGINT", "SIGINT after SIGTERM", "SIGTERM is no second signal", "the same one"],
)
def test_a_later_signal_ends_the_process_at_once(
    same_s: float, sent: Sequence[signal.Signals], said: str, code: int
) -> None:
    """Between two signals the process answers, so that they are two."""
    command = [sys.executable, "-c", WAITS, str(same_s)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "waits\n"
        process.send_signal(sent[0])
        assert process.stdout.readline() == f"first {int(sent[0])}\n"
        process.send_signal(sent[1])
        out, err = process.communicate("still here\n", timeout=60)
    assert (process.returncode, err) == (code, said)
    assert out == ("" if code else "still here\n")


@pytest.mark.parametrize("number", [1, 4, 7])
def test_a_signal_while_a_loop_takes_a_callback_loses_no_wake_up(number: int) -> None:
    """It comes after the loop has taken a callback that wakes a task, and before it is called."""
    taken = 0

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(asyncio.sleep(1.0))

    def profile(frame: FrameType, event: str, function: object) -> None:
        nonlocal taken
        if event == "c_return" and getattr(function, "__name__", "") == "popleft":
            taken += 1
            if taken == number:
                signal.raise_signal(SIGTERM)

    with pytest.raises(Terminated) as raised, signals_received(terminate):
        try:
            sys.setprofile(profile)
            clock.run(main(), virtual=True)
        finally:
            sys.setprofile(None)
    assert raised.value.signal == SIGTERM and taken > number, "the tasks have ended"


def test_a_signal_while_an_object_is_freed_is_raised_where_it_is_asked_for() -> None:
    """Of a callback of a weak reference Python only prints what is raised."""
    with pytest.raises(Terminated) as raised, signals_awaited() as check:
        check()
        freed = set[int]()
        reference = weakref.ref(freed, lambda _: signal.raise_signal(SIGTERM))
        del freed
        assert reference() is None
        check()
    assert raised.value.signal == SIGTERM
