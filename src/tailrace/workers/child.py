"""What every worker process begins with. Imports nothing heavy.

A worker ends by itself when its controller is gone, also in the midst of work: the system closes
the controller's end of the socket however the controller ended, and a thread waits for just that.
Ctrl-C is the controller's to decide about.
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tailrace.errors import ConfigError
from tailrace.settings import Settings
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.messages import BadConfig

Job = TypeVar("Job", bound=Settings)


def begin(job: type[Job]) -> tuple[socket.socket, Job]:
    """The socket to the controller and the job, from the command line that `WorkerProcess.spawn` made."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    return end, job.model_validate_json(sys.argv[2])


def end_with_controller(end: socket.socket, clean_up: Callable[[], None] = lambda: None) -> None:
    """Kill this process and all it started once the controller is gone, after `clean_up`."""

    def watch() -> None:
        wait_for_hang_up(end)
        clean_up()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end with controller", daemon=True).start()


def wait_for_hang_up(end: socket.socket) -> None:
    """Return when the other end is closed. That it says it will send nothing more is not enough."""
    poll = select.poll()
    poll.register(end, 0)
    poll.poll()


@contextmanager
def config_errors_sent(channel: WorkerChannel[Any]) -> Iterator[None]:
    """A ConfigError inside is the answer to the controller, and ends the process."""
    try:
        yield
    except ConfigError as error:
        channel.send(BadConfig.of(error))
        sys.exit(2)
