"""Where worker processes are started."""

import sys
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tailrace.devices import Devices
from tailrace.workers.conversation import Conversation
from tailrace.workers.messages import Job
from tailrace.workers.process import WorkerProcess, executed, forked

FORKED = frozenset(f"tailrace.workers.{name}_child" for name in ("engine", "trainer", "reference", "judge"))
"""Modules that import torch. Where they are forked, the import is done once for all workers of this host. The
libraries of other systems do not survive a fork."""


class Spawner(Protocol):
    """Starts worker processes, on this host or on others."""

    async def spawn(
        self,
        name: str,
        module: str,
        job: Job,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        devices: Devices | None = None,
    ) -> Conversation:
        """Start `python -m module` with a job.

        Args:
            name: of the worker, for messages and its log.
            decoder: decodes the messages of the worker.
            devices: what the worker may use of its machine; None: everything.
        """


class LocalSpawner:
    """Starts workers on this host.

    Args:
        logs: the folder in which `<name>.log` receives the output of each worker.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    async def spawn(
        self,
        name: str,
        module: str,
        job: Job,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        devices: Devices | None = None,
    ) -> WorkerProcess:
        """As Spawner.spawn."""
        begin = forked if module in FORKED and sys.platform == "linux" else executed
        return await WorkerProcess.spawn(
            name, module, job, decoder, logs=self._logs, devices=devices, begin=begin
        )
