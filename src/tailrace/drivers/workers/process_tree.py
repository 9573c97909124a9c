"""How processes end, and what happens to those whose parent dies (on Linux only).

The kernel sends a process a signal of its choice when its parent dies (PR_SET_PDEATHSIG), also while it is
stopped or still starting. A process that declares itself a subreaper (PR_SET_CHILD_SUBREAPER) becomes the
parent of all its descendants whose own parent dies, also of those with a session of their own. See prctl(2).

`python process_tree.py COMMAND` runs a program, and ends all that it started when it ends, or on SIGTERM.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

KILL_S = 2.0
"""Killed processes end within this time, unless the kernel itself holds them up."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded early: between fork and exec as little as possible may happen."""


CONTROLLER = "TAILRACE_CONTROLLER"
"""Tells a fork server whose it is: the controller may end before the server asks for its parent."""


def signal_on_parent_death(number: signal.Signals, parent: int) -> None:
    """Have the kernel send this process a signal when the thread that forked it ends.

    A process whose parent is already dead is killed.

    Args:
        number: SIGKILL ends the process. SIGCONT only continues a stopped one, which then ends by itself
            once it finds its parent gone. SIGTERM lets one clean up that is not stopped.
        parent: process id of the parent.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent dies."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def guard_group() -> None:
    """Fork a process that kills this process's group when this process has ended, even by SIGKILL. Call it
    before any thread is started."""
    group, (reading, _held) = os.getpgrp(), os.pipe()
    if os.fork():
        os.close(reading)
        return  # the other end is closed when this process ends
    os.setsid()
    os.dup2(reading, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.read(0, 1)
    kill_group(group)
    os._exit(0)


def children_of(parent: int) -> set[int]:
    """Return the process ids of the children of a process."""
    return {child for child, its_parent in _parents().items() if its_parent == parent}


def kill_descendants(*, spare: Collection[int] = ()) -> None:
    """End all descendants of this process with SIGKILL, and wait until they have ended. `spare`: children
    that live on, with their descendants."""
    deadline = time.monotonic() + KILL_S
    while (found := _descendants(spare)) and time.monotonic() < deadline:
        for descendant in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGKILL)
        for descendant in found:
            with suppress(ChildProcessError):  # not yet a child of this process
                os.waitpid(descendant, os.WNOHANG)
        time.sleep(0.001)


def _descendants(spare: Collection[int]) -> set[int]:
    parents = _parents()
    found: set[int] = set()
    generation = {os.getpid()}
    while generation:
        generation = {child for child, parent in parents.items() if parent in generation} - set(spare) - found
        found |= generation
    return found


def is_stopped(process: int) -> bool:
    """Return whether a process is stopped, or one of its descendants in the same group."""
    with suppress(OSError):  # it has ended
        state, _, group = _stat(Path(f"/proc/{process}/stat"))[:3]
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()
        return state == b"T" or any(
            os.getpgid(int(each)) == int(group) and is_stopped(int(each)) for each in children
        )
    return False


def exit_code_of_zombie(process: int) -> int | None:
    """Return the exit code of a process that has ended and was not reaped; None: it was, or it lives."""
    with suppress(OSError):
        state, *_, status = _stat(Path(f"/proc/{process}/stat"))
        return os.waitstatus_to_exitcode(int(status)) if state == b"Z" else None
    return None


def parent_of(child: int) -> int:
    """Return the process id of the parent. Raises an OSError if the child has ended and was reaped."""
    return int(_stat(Path(f"/proc/{child}/stat"))[1])


def _parents() -> dict[int, int]:
    """Return the parent of every process of the machine, by process id."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(status.parent.name)] = int(_stat(status)[1])
    return parents


def wait_for(child: int) -> int:
    """Return the status of a child once it has ended; reap adopted orphans meanwhile."""
    while (status := status_of(child, options=0)) is None:
        pass
    return status


def status_of(child: int, options: int = os.WNOHANG) -> int | None:
    """Reap what has ended. Return the status of a child if it is among them."""
    while True:
        pid, status = os.waitpid(-1, options)
        if pid == child:
            return status
        if not pid:
            return None


def run_contained(command: list[str]) -> None:
    """Run a program; end as it does, or on SIGTERM, once all that it started has ended. Never returns."""
    adopt_orphans()

    def end(number: int, _: object = None) -> None:
        kill_descendants()
        with suppress(OSError):  # it cannot be handled
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    me = os.getpid()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        signal_on_parent_death(signal.SIGKILL, me)
        os.execvp(command[0], command)
    exit_code = os.waitstatus_to_exitcode(wait_for(child))
    if exit_code < 0:
        end(-exit_code)
    kill_descendants()
    sys.exit(exit_code)


def _stat(status: Path) -> list[bytes]:
    """Return the state of a process, its parent, its group, and more: see proc(5)."""
    # pid (name) state parent group ... status: the name may contain spaces and brackets.
    return status.read_bytes().rpartition(b")")[2].split()


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


if __name__ == "__main__":
    run_contained(sys.argv[1:])
