"""The process that forks workers (forked.py): `python -m tailrace.workers.fork_server FD`.

torch and transformers take seconds of a core to import. This process imports the module of a worker when it
is first asked for one. Every further worker with that module starts in milliseconds, also an engine that
replaces a dead one. The workers share the memory of what was imported.

It runs no computation, has one thread and does not touch a GPU, so that its children can. Their torch has
the threads of their jobs; the BLAS library of numpy keeps one. The server dies with the controller, and they
with it. It ends by itself once it has had no worker for IDLE_S.
"""

import gc
import importlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from tailrace.workers.forked import NUMBER, Start
from tailrace.workers.orphans import signal_on_parent_death

IDLE_S = 60.0


def serve(controller: socket.socket) -> Start | None:
    """Fork workers as the controller asks for them, and tell it when they end.

    Returns:
        In a worker: what it shall do. None: in the server, at its end.
    """
    woken, wakes = socket.socketpair()
    for each in (woken, wakes):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    events = select.poll()
    for each in (controller, woken):
        events.register(each, select.POLLIN)
    running: dict[int, socket.socket] = {}
    while ready := events.poll(None if running else IDLE_S * 1000):
        with suppress(BlockingIOError):
            woken.recv(4096)
        _reap(running)
        if controller.fileno() not in dict(ready):
            continue
        _, received, _, _ = socket.recv_fds(controller, 1, 3)
        if not received:
            return None
        end, log, status = received
        _print_to(log)
        asked = socket.socket(fileno=status)
        try:
            start = _read(asked)
        except msgspec.DecodeError:  # it is cut off: the start was cancelled
            os.close(end)
            asked.close()
            continue
        server, has_cuda = os.getpid(), _has_initialised_cuda()
        if pid := os.fork():
            os.close(end)
            _tell(pid, asked)
            running[pid] = asked
            continue
        signal_on_parent_death(signal.SIGKILL, server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (controller, woken, wakes, asked, *running.values()):
            each.close()
        _become(start, end)
        if has_cuda:
            raise SystemExit(
                f"a module that {start.module} imports has initialised CUDA, which then works in no process "
                "that is forked. bitsandbytes does so: uninstall it, or import it where it is first used"
            )
        return start
    return None


def _tell(pid: int, asked: socket.socket) -> None:
    """Tell the controller that a worker runs. It leads a group by then, which can be killed."""
    _print_to(os.open(os.devnull, os.O_WRONLY))  # the folder of the run may be removed
    with suppress(OSError):  # it has ended already
        os.setpgid(pid, pid)
    with suppress(ConnectionError):
        asked.sendall(NUMBER.pack(pid))


def _reap(running: dict[int, socket.socket]) -> None:
    """Send the exit codes of the workers that have ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if asked := running.pop(pid, None):  # else an import has started it
            with asked, suppress(ConnectionError):
                asked.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _print_to(file: int) -> None:
    """Let all output go to a file, and close its descriptor."""
    for standard in (1, 2):
        os.dup2(file, standard)
    os.close(file)


def _read(asked: socket.socket) -> Start:
    """Read what a worker shall do, and import its module. An import that fails is repeated in the worker."""
    with asked.makefile("rb") as file:
        start = msgspec.msgpack.decode(file.read(), type=Start)
    if start.module not in sys.modules:
        with suppress(Exception):
            importlib.import_module(start.module)
        gc.freeze()
    return start


def _has_initialised_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _become(start: Start, end: int) -> None:
    """Turn this process into a worker."""
    os.setpgid(0, 0)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.path[:] = start.path
    sys.argv = [start.module, str(end), start.job]
    if sys.platform == "linux":
        with suppress(OSError):
            Path("/proc/self/comm").write_text(start.name[:15])
        if start.cpus:
            os.sched_setaffinity(0, start.cpus)
    if torch := sys.modules.get("torch"):  # it read the environment when it was imported
        torch.set_num_threads(start.threads)


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    if start := serve(socket.socket(fileno=int(sys.argv[1]))):
        importlib.import_module(start.module).main()


if __name__ == "__main__":
    main()
