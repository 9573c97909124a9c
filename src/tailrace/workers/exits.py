"""How processes end."""

import os
import signal
from contextlib import suppress


def kill_group(leader: int) -> None:
    """Send SIGKILL to every process of a group; the group may have ended already."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def exit_cause(exit_code: int) -> str:
    """Describe how a process ended, from its exit code as `subprocess` gives it.

    Example:
        >>> exit_cause(-9), exit_cause(3)
        ('signal SIGKILL', 'exit code 3')
    """
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
