"""The controller's side of an engine process: samples grow here while the engine generates there."""

import asyncio
from dataclasses import dataclass

import msgspec

from tailrace.engine.base import GenerationRequest, Usage
from tailrace.types import KV, Sample
from tailrace.weights.base import Weights
from tailrace.workers.messages import Abort, Done, EngineJob, FromEngine, Load, Report
from tailrace.workers.process import RemoteWorker, WorkerProcess


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


class RemoteEngine(RemoteWorker[EngineJob]):
    """An Engine (engine/base.py) in a process of its own."""

    module = "tailrace.workers.engine_child"
    decoder = msgspec.msgpack.Decoder(FromEngine)
    open = True
    """Stays True when the process dies: `generate` then raises how it died."""

    def __init__(self, process: WorkerProcess, job: EngineJob) -> None:
        super().__init__(process, job)
        self.name, self.slots = process.name, job.engine.max_num_seqs
        process.on_message = self._on_message
        self._requests: dict[str, _Request] = {}
        self._usage = Usage()

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
