"""What the first signal, its repetition, and a later one do to a process that waits."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from signal import SIGHUP, SIGINT, SIGTERM

import pytest

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
