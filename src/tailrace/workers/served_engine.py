"""The HTTP server's side of its engine process: requests go in, outputs come back as they are generated."""

from collections.abc import Callable

import msgspec

from tailrace.engine.base import GenerationOutput, GenerationRequest, Usage
from tailrace.types import KV
from tailrace.weights.base import Link, Weights
from tailrace.workers.messages import Abort, Done, EngineJob, FromEngine, Load, Pause, Report, Resume
from tailrace.workers.process import RemoteWorker, WorkerProcess


class ServedEngine(RemoteWorker[EngineJob]):
    """One process of the embedded engine: an EngineProcess (engine/serve/base.py).

    Once the process has ended, every method raises WorkerDied.
    """

    module = "tailrace.workers.engine_child"
    decoder = msgspec.msgpack.Decoder(FromEngine)

    def __init__(self, process: WorkerProcess, job: EngineJob) -> None:
        super().__init__(process, job)
        self.on_output: Callable[[GenerationOutput], None] = lambda output: None
        self.on_aborted: Callable[[str], None] = lambda id: None
        self._usage = Usage()
        process.on_message = self._on_message

    def submit(self, request: GenerationRequest) -> None:
        """As EngineProcess.submit."""
        self.process.send(request)

    def abort(self, id: str) -> None:
        """As EngineProcess.abort."""
        self.process.send(Abort(id))

    async def pause(self) -> None:
        """As EngineProcess.pause."""
        await self.process.ask(Pause(), Done)

    async def resume(self) -> None:
        """As EngineProcess.resume."""
        await self.process.ask(Resume(), Done)

    async def load(self, weights: Weights, link: Link, *, kv: KV) -> None:
        """As EngineProcess.load."""
        await self.process.ask(Load(weights, link, kv), Done)

    def usage(self) -> Usage:
        """As EngineProcess.usage."""
        return self._usage

    def _on_message(self, message: msgspec.Struct) -> None:
        if not isinstance(message, Report):
            self.process.answer(message)
            return
        self._usage = message.usage
        for output in message.outputs:
            self.on_output(output)
        for id in message.aborted:
            self.on_aborted(id)
