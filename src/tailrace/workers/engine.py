"""The controller's side of an engine process: samples grow here while the engine generates there."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace.engine.base import GenerationRequest, Usage
from tailrace.types import KV, Sample
from tailrace.weights.base import Weights
from tailrace.workers.messages import Abort, Done, EngineJob, FromEngine, Load, Ready, Report
from tailrace.workers.process import WorkerProcess


@dataclass(slots=True)
class _Request:
    """A sample that the engine serves.

    Args:
        ended: done when the sample has its last token.
        aborted: done when the engine has aborted the request and its tokens are in the sample.
    """

    sample: Sample
    ended: asyncio.Future[None]
    aborted: asyncio.Future[None] | None = None


class RemoteEngine:
    """An Engine (engine/base.py) in a process of its own.

    Every method also raises WorkerDied if the process has ended.
    """

    def __init__(self, process: WorkerProcess, slots: int) -> None:
        self.name = process.name
        self.slots = slots
        self.open = True
        """Stays True when the process dies: `generate` then raises how it died."""
        self.process = process
        process.on_message = self._on_message
        self._requests: dict[str, _Request] = {}
        self._usage = Usage()

    @classmethod
    async def spawn(cls, name: str, job: EngineJob, *, logs: Path, pin: int | None = None) -> "RemoteEngine":
        """Start the process. `ready` waits until it has loaded the model.

        Args:
            logs: the folder for the file with the output of the process.
            pin: the CPU it runs on; None: any.
        """
        decoder = msgspec.msgpack.Decoder(FromEngine)
        module = "tailrace.workers.engine_child"
        threads = job.engine.threads
        process = await WorkerProcess.spawn(name, module, job, decoder, logs=logs, threads=threads, pin=pin)
        return cls(process, job.engine.max_num_seqs)

    async def ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ConfigError: it cannot be loaded.
        """
        await self.process.answered(Ready, f"{self.name} to load the model")

    async def generate(self, sample: Sample) -> None:
        """As Engine.generate. A cancelled call returns once the engine has aborted the request and all tokens
        are in the sample. Cancelling it again in the meantime has no effect."""
        id = str(sample.id)
        self.process.send(
            GenerationRequest(id, sample.prompt.ids, sample.completion_ids, sample.seed, sample.greedy)
        )
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
        """As of the engine's last report: at most `report_every_s` ago while it generates, and exact once all
        requests have ended."""
        return self._usage

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

    def _on_message(self, message: msgspec.Struct) -> None:
        if not isinstance(message, Report):
            self.process.answer(message)
            return
        self._usage = message.usage
        for output in message.outputs:
            request = self._requests.get(output.id)
            if request is None:  # submitted at its limit, and aborted before the engine looked at it
                assert not output.ids, output
                continue
            request.sample.extend(output.ids, output.behavior_logprobs, output.version)
            if output.finish_reason is not None:
                request.sample.finish_reason = output.finish_reason
                if not request.ended.done():
                    request.ended.set_result(None)
        for id in message.aborted:
            aborted = self._requests[id].aborted
            if aborted is not None and not aborted.done():
                aborted.set_result(None)
