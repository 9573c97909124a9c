"""Workers that are forked from a process which has imported their module (fork_server.py)."""

import asyncio
import atexit
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from typing import ClassVar

import msgspec

from tailrace.workers.orphans import signal_on_parent_death

NUMBER = struct.Struct("i")
"""How the server sends the process id of a worker, and its exit code once it has ended."""
READ_AT_IMPORT = ("CUDA_", "HF_", "MKL_", "OMP_", "PYTORCH_", "TORCH", "TRANSFORMERS_")
"""How the names of variables begin that torch and transformers read when they are imported."""


class Start(msgspec.Struct):
    """What a forked worker gets instead of a command line.

    Args:
        name: of the process, for `ps` and `top`.
        module: its `main` is called.
        job: as JSON.
        cpus: it may run on; empty: on all.
    """

    name: str
    module: str
    job: str
    threads: int
    environment: dict[str, str]
    path: list[str]
    folder: str
    cpus: list[int]


class Forked:
    """A forked worker.

    Args:
        status: receives its exit code.
    """

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid, self._status = pid, status

    async def wait(self) -> int:
        """Return the exit code, as `subprocess` gives it. A worker dies with the server."""
        with self._status:
            return await _number(self._status, missing=-signal.SIGKILL)


class ForkServer:
    """The controller's side of a fork server.

    Args:
        environment: of the server; that of each worker replaces it.
        log: file that receives its output until the first worker starts.
    """

    _shared: ClassVar[dict[object, "ForkServer"]] = {}

    def __init__(self, environment: dict[str, str], log: int) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.workers.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: signal_on_parent_death(signal.SIGKILL, self._owner),
            )
        atexit.register(self.kill)

    @classmethod
    def shared(cls, environment: dict[str, str], log: int) -> "ForkServer":
        """Return the server of this thread whose libraries have read the same variables; start it if there
        is none. The kernel ends it together with the thread that has started it."""
        read = frozenset(item for item in environment.items() if item[0].startswith(READ_AT_IMPORT))
        key = (threading.get_ident(), read)
        server = cls._shared.get(key)
        if server is None or server._owner != os.getpid() or server._process.poll() is not None:
            if server is not None:
                server.kill()
            server = cls._shared[key] = cls(environment, log)
        return server

    async def fork(self, start: Start, end: socket.socket, log: int) -> Forked:
        """Start a worker. The first one of a module waits until the server has imported the module.

        Args:
            end: the worker's end of its socket.
            log: file that receives its output.

        Raises:
            EOFError: the server has ended.
        """
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        try:
            with theirs, suppress(ConnectionError):
                socket.send_fds(self._socket, [b"+"], [end.fileno(), log, theirs.fileno()])
            with suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(mine, msgspec.msgpack.encode(start))
                mine.shutdown(socket.SHUT_WR)
            if not (pid := await _number(mine, missing=0)):
                raise EOFError
        except BaseException:
            mine.close()
            raise
        return Forked(pid, mine)

    def kill(self) -> int:
        """Kill the server and thereby its workers. Does nothing in a process that is forked from the owner.

        Returns:
            Its exit code; it may have ended before.
        """
        atexit.unregister(self.kill)
        self._socket.close()
        if self._owner != os.getpid():
            return 0
        self._process.kill()
        return self._process.wait()


async def _number(status: socket.socket, *, missing: int) -> int:
    """Receive a number; `missing` where the server has ended."""
    loop = asyncio.get_running_loop()
    try:
        with suppress(ConnectionError):
            if received := await loop.sock_recv(status, NUMBER.size):
                (number,) = NUMBER.unpack(received)
                return int(number)
    finally:
        loop.remove_reader(status)  # asyncio would do it after the socket is closed and its number used again
    return missing
