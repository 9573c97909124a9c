"""What the controller's sides of all workers have in common."""

from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from tailrace.devices import Devices
from tailrace.workers.base import BrokerSettings
from tailrace.workers.conversation import Conversation
from tailrace.workers.messages import Job, Ready
from tailrace.workers.spawner import Spawner

JobT = TypeVar("JobT", bound=Job)


class RemoteWorker(Generic[JobT]):
    """The controller's side of a worker. Its methods raise WorkerDied if the process has ended."""

    module: ClassVar[str]
    """The module that the process runs."""
    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]
    """Decodes the messages of the process."""

    def __init__(self, process: Conversation, job: JobT) -> None:
        self.process, self.job = process, job
        self._started = process.next_answer()

    @classmethod
    async def spawn(cls, name: str, job: JobT, spawner: Spawner, devices: Devices | None = None) -> Self:
        """Start the process, as `Spawner.spawn`."""
        return cls(await spawner.spawn(name, cls.module, job, cls.decoder, devices=devices), job)

    @classmethod
    async def join(cls, name: str, job: JobT, broker: BrokerSettings, run: str) -> Self:
        """Invite a worker of any host, as `BrokeredWorker.invite`."""
        from tailrace.workers.broker import BrokeredWorker

        return cls(await BrokeredWorker.invite(name, job, cls.decoder, broker, run), job)

    async def ready(self) -> None:
        """Wait until the process has loaded what its job names.

        Raises:
            ConfigError: it cannot be loaded.
        """
        await self.process.answered(self._started, Ready, "start")

    async def close(self) -> None:
        """End the process."""
        await self.process.close()
