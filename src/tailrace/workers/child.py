"""The start of every worker process. Imports nothing heavy.

A worker ends when its controller is gone, also in the middle of work, stopped, or still starting:

- The kernel kills it when its parent dies: the controller (process.py sets that before exec), or the fork
  server, which the kernel kills when the controller dies (fork_server.py).
- A worker that must clean up first is only continued by the kernel, in case it is stopped. A thread of it
  waits until the controller's end of the socket is closed, cleans up, and kills the process.

SIGINT is ignored: Ctrl-C is the controller's to handle.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC
from typing import Any, TypeVar

from tailrace.errors import ConfigError, DiskFull
from tailrace.settings import Settings
from tailrace.workers.channel import WorkerEnd
from tailrace.workers.messages import Refused
from tailrace.workers.orphans import signal_on_parent_death

Job = TypeVar("Job", bound=Settings)
_M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


def begin(job: type[Job]) -> tuple[socket.socket, Job]:
    """Read the command line that `WorkerProcess.spawn` made.

    Signals are the controller's to handle: what sends them to every process must not take the trainer away
    before its weights are saved.

    Returns:
        The socket to the controller, and the job.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    return end, job.model_validate_json(sys.argv[2])


def end_with_controller(end: socket.socket, clean_up: Callable[[], None] | None = None) -> None:
    """Kill this process and its process group once the controller is gone.

    Args:
        end: the socket to the controller.
        clean_up: called before that.
    """
    if clean_up is not None:
        signal_on_parent_death(signal.SIGCONT, os.getppid())

    def watch() -> None:
        hang_up = select.poll()
        hang_up.register(end, 0)  # the other end is closed; a shutdown for writing alone is no hang-up
        hang_up.poll()
        if clean_up is not None:
            clean_up()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end with controller", daemon=True).start()


def give_memory_back() -> None:
    """Return freed memory to the system and to the GPU. The allocators of glibc and torch keep it."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # without CUDA it does nothing
    _call_glibc("malloc_trim", 0)


def return_freed_tensors() -> None:
    """Let glibc map blocks of 1 MiB and more apart: when freed, they return to the system.

    By default it raises this limit up to 32 MiB and takes activations from its heap, where small tensors that
    stay, such as an adapter's moments, divide the freed memory: the next step then needs new memory.
    """
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, 2**20)


def _call_glibc(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            getattr(ctypes.CDLL(None), name)(*arguments)


@contextmanager
def config_errors_sent(channel: WorkerEnd[Any]) -> Iterator[None]:
    """Send a ConfigError of the block to the controller, or that the disk is full, and exit."""
    try:
        yield
    except (ConfigError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno in (ENOSPC, EDQUOT):
            channel.send(Refused.of(DiskFull(f"{cause}; make room on the disk, then --resume")))
        elif isinstance(error, ConfigError):
            channel.send(Refused.of(error))
        else:
            raise
        sys.exit(2)
