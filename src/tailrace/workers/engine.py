"""The controller's side of an engine process: samples grow here while the engine generates there."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property

from tailrace.engine.base import Capabilities, GenerationRequest, TokenCounter, Usage
from tailrace.errors import EngineDied, TransferFailed, WorkerDied
from tailrace.trainer.adapter import adapter_tensors
from tailrace.types import KV, Sample
from tailrace.weights.base import (
    Link,
    Send,
    TensorInfo,
    Weights,
    check_tensors,
    expected_tensors,
    new_link,
    send_and_load,
)
from tailrace.workers.conversation import Conversation
from tailrace.workers.engine_process import EngineProcess
from tailrace.workers.messages import Abort, Done, EngineJob, Load, Report, Sleep, Wake


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


class RemoteEngine(EngineProcess):
    """One process of the embedded engine: an EngineLife (engine/base.py).

    Once the process has ended, every method raises EngineDied.
    """

    capabilities = Capabilities(exact_versions=True, sleep=True)

    def __init__(self, process: Conversation, job: EngineJob) -> None:
        super().__init__(process, job)
        self.counter = TokenCounter()
        self._requests: dict[str, _Request] = {}
        self._link = new_link(process.name)
        self.send: Send = _is_in_files
        """The trainer's half of a transfer; the owner sets it."""

    async def generate(self, sample: Sample) -> None:
        """As Engine.generate. A cancelled call returns once the engine has aborted the request and all tokens
        are in the sample. Cancelling it again in the meantime has no effect."""
        id = str(sample.id)
        limit = min(self.job.sampling.max_completion_tokens, sample.turn_limit)
        with _deaths():
            self.process.send(
                GenerationRequest(
                    id,
                    sample.turn_context_ids,
                    sample.turn_ids,
                    sample.turn_seed,
                    sample.greedy,
                    temperature=sample.temperature,
                    max_completion_tokens=int(limit) - sample.turn_start,
                )
            )
            self._requests[id] = request = _Request(sample, self.process.promise())
            try:
                await request.ended
            except asyncio.CancelledError:
                with suppress(WorkerDied):  # then there is nothing more to come
                    await self._abort(id, request)
                raise
            finally:
                del self._requests[id]

    async def load(self, weights: Weights, *, kv: KV) -> None:
        """As EngineLife.load.

        Raises:
            WeightsRefused: the weights are not those of the model. The engine was not asked.
        """
        if weights.tensors:
            check_tensors(weights.tensors, self._expected)
        try:
            await send_and_load(self.send(weights, self._link), self._load(weights, kv))
        except BaseException:  # the link may be in the middle of a transfer
            self._link = new_link(self.process.name)
            raise

    async def sleep(self) -> None:
        """As EngineLife.sleep."""
        with _deaths():
            await self.process.ask(Sleep(), Done)

    async def wake(self) -> None:
        """As EngineLife.wake."""
        with _deaths():
            await self.process.ask(Wake(), Done)

    def usage(self) -> Usage:
        """As of the engine's last report: at most `report_every_s` ago while it generates, and exact once all
        requests have ended. A process that has ended cannot tell its own count any more."""
        num_counted = None if self.process.has_ended else self._usage.num_counted
        return replace(self._usage, num_generated=self.counter.num, num_counted=num_counted)

    @cached_property
    def _expected(self) -> tuple[TensorInfo, ...]:
        if self.job.adapter:
            return adapter_tensors(self.job.model, self.job.adapter)
        return expected_tensors(self.job.model, self.job.engine.dtype)

    async def _load(self, weights: Weights, kv: KV) -> None:
        with _deaths():
            await self.process.ask(Load(weights, self._link, kv), Done)

    async def _abort(self, id: str, request: _Request) -> None:
        request.aborted = aborted = self.process.promise()
        self.process.send(Abort(id))
        while not aborted.done():
            try:
                await asyncio.wait([aborted])
            except asyncio.CancelledError:  # the first one is raised again when the tokens are here
                continue
        aborted.result()

    def _on_report(self, report: Report) -> None:
        for output in report.outputs:
            request = self._requests.get(output.id)
            if request is None:  # submitted at its limit, and aborted before the engine looked at it
                assert not output.ids, output
                continue
            self.counter.add(len(output.ids))
            request.sample.extend(output.ids, output.behavior_logprobs, output.version)
            if output.finish_reason is not None:
                request.sample.finish_reason = output.finish_reason
                if not request.ended.done():
                    request.ended.set_result(None)
        for id in report.aborted:
            aborted = self._requests[id].aborted
            if aborted is not None and not aborted.done():
                aborted.set_result(None)


async def _is_in_files(weights: Weights, link: Link) -> None:
    if weights.is_streamed:
        raise TransferFailed(f"{link.engine}: no trainer sends the weights of {weights.location}")


@contextmanager
def _deaths() -> Iterator[None]:
    """Turn WorkerDied into EngineDied: the sample keeps its tokens, and another engine continues it."""
    try:
        yield
    except WorkerDied as died:
        raise EngineDied(str(died)) from died
