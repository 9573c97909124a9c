"""What all owners of a process of the embedded engine do: take its reports, and see that it answers."""

import asyncio

import msgspec

from tailrace.engine.base import Usage
from tailrace.errors import WorkerDied
from tailrace.workers.conversation import Conversation
from tailrace.workers.messages import Alive, EngineJob, FromEngine, Ping, Report
from tailrace.workers.remote import RemoteWorker


class EngineProcess(RemoteWorker[EngineJob]):
    """One process of the embedded engine."""

    module = "tailrace.workers.engine_child"
    decoder = msgspec.msgpack.Decoder(FromEngine)

    def __init__(self, process: Conversation, job: EngineJob) -> None:
        super().__init__(process, job)
        process.on_message = self._on_message
        self._usage = Usage()
        """Of the last report."""
        self._alive: asyncio.Future[None] | None = None
        """Done when the last Ping is answered."""

    async def died(self) -> str:
        """Wait until the process has ended, or has not answered for `engine.health_timeout_s`, because it is
        stopped or a decode step does not end. It is then killed."""
        limit_s = self.job.engine.health_timeout_s
        ended = asyncio.ensure_future(self.process.last_words())
        try:
            while not ended.done():
                self._alive = alive = self.process.promise()
                self.process.send(Ping())
                await asyncio.wait([alive], timeout=limit_s)
                if not alive.done():
                    self.process.kill()
                    return (
                        f"{self.process.name} did not answer for {limit_s:g} s "
                        "(engine.health_timeout_s) and was killed"
                    )
                await asyncio.wait([ended], timeout=limit_s / 4)
            return ended.result()
        except WorkerDied as died:
            return str(died)
        finally:
            ended.cancel()

    def _on_message(self, message: msgspec.Struct) -> None:
        if isinstance(message, Alive):
            if self._alive is not None and not self._alive.done():
                self._alive.set_result(None)
        elif isinstance(message, Report):
            self._usage = message.usage
            self._on_report(message)
        else:
            self.process.answer(message)

    def _on_report(self, report: Report) -> None:
        """Handle new tokens and aborts."""
        raise NotImplementedError
