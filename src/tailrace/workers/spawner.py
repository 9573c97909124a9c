"""Where worker processes are started."""

from pathlib import Path
from typing import Any, Protocol

import msgspec

from tailrace.devices import Devices
from tailrace.workers.conversation import Conversation
from tailrace.workers.messages import Job
from tailrace.workers.process import WorkerProcess


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
        return await WorkerProcess.spawn(name, module, job, decoder, logs=self._logs, devices=devices)
