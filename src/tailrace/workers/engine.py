"""One engine, as the controller sees it: samples grow here while they are generated there."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace.engine.base import Usage
from tailrace.types import KV, Sample
from tailrace.weights.base import Weights
from tailrace.workers.messages import (
    Abort,
    CheckIntegrity,
    Done,
    EngineJob,
    FromEngine,
    Generate,
    Load,
    Ready,
    Report,
    Settle,
)
from tailrace.workers.process import WorkerProcess


@dataclass(slots=True)
class _Request:
    sample: Sample
    ended: asyncio.Future[None]
    """It has all its tokens."""
    aborted: asyncio.Future[None] | None = None
    """The engine has given it up, and its tokens are here."""


class RemoteEngine:
    """An Engine (engine/base.py) in a process of its own.

    What it raises besides: WorkerDied, if the process ends.
    """

    def __init__(self, process: WorkerProcess, slots: int) -> None:
        self.name = process.name
        self.slots = slots
        self.open = True
        """A dead engine stays open: whoever asks it learns how it died."""
        self.process = process
        process.on_message = self._hear
        self._requests: dict[str, _Request] = {}
        self._usage = Usage()

    @classmethod
    async def spawn(cls, name: str, job: EngineJob, *, logs: Path, pin: int | None = None) -> "RemoteEngine":
        """Start the process; `ready` waits until it has loaded the model."""
        decoder = msgspec.msgpack.Decoder(FromEngine)
        module = "tailrace.workers.engine_child"
        threads = job.engine.threads
        process = await WorkerProcess.spawn(name, module, job, decoder, logs=logs, threads=threads, pin=pin)
        return cls(process, job.engine.max_running)

    async def ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ConfigError: it cannot be.
        """
        await self.process.answered(Ready, f"{self.name} to load the model")

    @property
    def idle(self) -> bool:
        """Nobody waits for it to generate anything."""
        return not self._requests

    async def generate(self, sample: Sample) -> None:
        """As Engine.generate. When cancelled, it returns once the engine has given up the request, so
        that no token is lost; being cancelled again meanwhile changes nothing."""
        id = str(sample.id)
        self.process.send(Generate(id, sample.prompt.ids, sample.completion_ids, sample.seed))
        self._requests[id] = request = _Request(sample, self.process.promise())
        try:
            await request.ended
        except asyncio.CancelledError:
            await self._abort(id, request)
            raise
        finally:
            del self._requests[id]

    async def load(self, weights: Weights, *, kv: KV) -> None:
        """As Engine.load."""
        await self.process.ask(Load(weights, kv), Done)

    def usage(self) -> Usage:
        """As it last said, at most half a second ago while it generates; `settle` for the very latest."""
        return self._usage

    async def settle(self) -> None:
        """Have every sample and `usage` as they are now."""
        await self.process.ask(Settle(), Done)

    async def integrity(self) -> None:
        """Prove that the engine, which must be idle, leaked nothing.

        Raises:
            WorkerDied: a broken invariant ends it, with the reason in its last words.
        """
        await self.process.ask(CheckIntegrity(), Done)

    async def close(self) -> None:
        """End the process."""
        await self.process.close()

    async def _abort(self, id: str, request: _Request) -> None:
        request.aborted = aborted = self.process.promise()
        self.process.send(Abort(id))
        while not aborted.done():
            try:
                await asyncio.wait([aborted])
            except asyncio.CancelledError:  # the first one is raised again when the tokens are here
                continue
        aborted.result()

    def _hear(self, message: msgspec.Struct) -> None:
        if not isinstance(message, Report):
            self.process.answer(message)
            return
        self._usage = message.usage
        for gained in message.gained:
            request = self._requests.get(gained.id)
            if request is None:  # at its limit when it was sent, and aborted before the engine looked
                assert not gained.ids, gained
                continue
            request.sample.extend(gained.ids, gained.logprobs, gained.version)
            if gained.finish_reason is not None:
                request.sample.finish_reason = gained.finish_reason
                if not request.ended.done():
                    request.ended.set_result(None)
        for id in message.aborted:
            aborted = self._requests[id].aborted
            if aborted is not None and not aborted.done():
                aborted.set_result(None)
