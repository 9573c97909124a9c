"""An engine in a process of its own, from both sides: samples grow here while the engine generates there.

Finished requests are reported in the iteration in which they end. Unfinished ones are reported every
`report_every_s`, before a load, and when they are aborted. An idle engine blocks on its connection.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from tailrace.clock import ended, now, waiting
from tailrace.contracts.engine import (
    Arrival,
    Capabilities,
    GenerationOutput,
    GenerationRequest,
    TokenCounter,
    Usage,
)
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import LoraSettings
from tailrace.contracts.weights import Link, Probe, TensorInfo, Weights
from tailrace.devices import used_on
from tailrace.drivers.engine.proof import ProbeAnswer, Prover
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.trainer.adapter import adapter_tensors
from tailrace.drivers.weights.manifest import check_tensors, expected_tensors
from tailrace.drivers.weights.transfers import Receiver, Transfers
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.process import give_memory_back
from tailrace.drivers.workers.worker import Job, Worker, WorkerConnection, beside
from tailrace.errors import EngineDied, NotWoken, TransferFailed, VersionGone, WeightsRefused, WorkerDied
from tailrace.types import KV, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.drivers.engine.native.engine import NativeEngine


class EngineJob(Job):
    """Serve a model."""

    health_key = "engine.health_timeout_s"
    model: Path
    engine: NativeEngineSettings
    sampling: SamplingSettings
    report_every_s: float = 0.5
    """Seconds between reports of unfinished requests. Finished requests are reported at once."""
    adapter: LoraSettings | None = None
    """New weights come as adapters of these settings. None: they come whole."""

    @override
    def folders(self) -> Mapping[str, Path]:
        return {"model.path": self.model}


class Alive(msgspec.Struct):
    """The engine's loop runs, or a part of new weights has arrived."""


class Report(msgspec.Struct):
    """Outputs of the engine since its last report.

    Args:
        aborted: ids of aborted requests, whose last outputs have been reported.
        refused: ids of requests whose version the engine does not have; the same of their last outputs.
    """

    outputs: list[GenerationOutput]
    aborted: list[str]
    refused: list[str]
    usage: Usage


class EngineWorker(Worker):
    """A loop that executes calls, decodes one step and reports."""

    job_type = EngineJob
    role = "engine"
    events = (Report, Alive)

    def __init__(self, engine: "NativeEngine", connection: WorkerConnection, job: EngineJob) -> None:
        from tailrace.drivers.weights.transports import WeightReceiver

        self._engine, self._connection, self._job = engine, connection, job
        self._report_every_s = job.report_every_s
        self._reported_s = time.monotonic()
        self._outputs: list[GenerationOutput] = []
        self._aborted: list[str] = []
        self._paused = self._unproven = False
        self._prover: Prover | None = None
        self._receiver = WeightReceiver(device=job.engine.device)

    @override
    @classmethod
    def load_job(cls, job: EngineJob, connection: WorkerConnection) -> "EngineWorker":
        from tailrace.drivers.engine.native.engine import engine_class

        lora = job.adapter
        scale, num = (lora.alpha / lora.rank, lora.versions) if lora else (None, 1)
        model, settings, sampling = job.model, job.engine, job.sampling
        engine = engine_class(model)(model, settings, sampling, adapter_scale=scale, num_versions=num)
        return cls(engine, connection, job)

    @override
    def serve(self, connection: WorkerConnection) -> None:
        while (calls := connection.receive(wait=self._rests())) is not None:
            for call in calls:
                if not connection.execute_beside(self, call):
                    connection.execute(self, call)
            if not self._rests():
                self._outputs += self._engine.step()
            if time.monotonic() - self._reported_s >= self._report_every_s:
                self._outputs += self._engine.report()
                self._reported_s = time.monotonic()
            if self._outputs or self._aborted or self._engine.refused:
                self._report()

    def submit(self, request: GenerationRequest) -> None:
        """Generate. The outputs are reported."""
        self._engine.submit(request)

    def abort(self, id: str) -> None:
        """End a request now. Its id is reported after its last output."""
        output = self._engine.abort(id)
        self._outputs += [output] if output else self._engine.report()
        self._aborted.append(id)

    def load(self, weights: Weights, link: Link, kv: KV) -> Arrival | None:
        """Take new weights. It is alive after each part of them. With a probe, answer it. After a wrong
        answer nothing is generated until the next load.

        Raises:
            TransferFailed: they did not arrive; the old weights stay.
            WeightsRefused: they are not those of the model; the old weights stay.
        """
        tensors: dict[str, Tensor] = {}
        for part in self._receiver.parts(weights, link):
            tensors |= part
            self._connection.tell(Alive())  # a transfer may take longer than the health check waits
        probe, arrival = weights.probe, None
        if probe and self._prover is None:
            dtype, adapter = self._job.engine.dtype, self._job.adapter is not None
            self._prover = Prover(probe, self._answer(probe), exact=True, dtype=dtype, adapter=adapter)
        try:
            self._outputs += self._engine.load(tensors, version=weights.version, kv=kv)
        except ValueError as why:
            raise WeightsRefused(str(why)) from why
        if self._prover and probe and probe.expected:
            start_s = time.perf_counter()
            answer = self._answer(probe)
            arrival = self._prover.judge(weights.version, probe, answer, time.perf_counter() - start_s)
            arrival = msgspec.structs.replace(arrival, gpu=used_on(self._job.engine.device))
        self._unproven = arrival is not None and bool(arrival.cause)
        self._report()
        return arrival

    def _answer(self, probe: Probe) -> ProbeAnswer:
        from tailrace.drivers.weights.tensors import checksums

        warm, cold = self._engine.probe(probe.ids, probe.num_prefix)
        return ProbeAnswer(warm, cold, {} if self._job.adapter else checksums(self._engine.weights()))

    def score(self, ids: list[int], num_prefix: int) -> list[float]:
        """Return the log-probs of a probe after its prefix."""
        return self._engine.score(ids, num_prefix)

    @beside
    def connect(self, location: str, link: Link) -> None:
        """Connect to the trainer over a link (`ProcessGroupReceiver.connect`)."""
        self._receiver.connect(location, link)

    def pause(self) -> None:
        """Generate nothing until `resume`; loads and aborts still happen. All tokens are reported before."""
        self._set_paused(True)

    def resume(self) -> None:
        """Generate again."""
        self._set_paused(False)

    def ping(self) -> None:
        """Be alive between two decode steps."""
        self._connection.tell(Alive())

    def sleep(self) -> None:
        """Free the memory of weights and KV cache. Nothing runs."""
        self._engine.sleep()
        give_memory_back()

    def wake(self) -> None:
        """Take the memory back, with the weights of the model folder. It is alive after each file. Raises a
        NotWoken if there is no memory."""
        try:
            self._engine.wake(self.ping)
        except (RuntimeError, MemoryError) as why:  # of torch's allocators, and of a mapped file
            self._engine.sleep()
            raise NotWoken(str(why)) from why

    def _rests(self) -> bool:
        return self._paused or self._unproven or self._engine.idle

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._outputs += self._engine.report()
        self._report()

    def _report(self) -> None:
        engine = self._engine
        self._connection.tell(Report(self._outputs, self._aborted, engine.refused, engine.usage()))
        self._outputs, self._aborted, engine.refused = [], [], []


class EngineClient:
    """The owner of an engine's process: takes its reports, and checks that it answers."""

    def __init__(self, worker: RemoteWorker, job: EngineJob) -> None:
        self.worker, self.job = worker, job
        self._usage = Usage()
        """Usage in the last report."""
        self._alive: asyncio.Future[None] | None = None
        """Done when the last ping is answered."""
        self._heard_s = now()
        """Time of the last message of the process."""
        self._fault = ""
        """Reason for which it was killed."""
        worker.subscribe(self._on_event)

    async def ready(self) -> None:
        """Wait until the model is loaded. Raises a ConfigError if it cannot be."""
        await self.worker.ready()

    async def close(self) -> None:
        """End the process."""
        await self.worker.close()

    async def died(self) -> str:
        """Wait until the process has ended, or has not answered for `engine.health_timeout_s`, because it is
        stopped or a decode step does not end. It is then killed."""
        limit_s = self.job.engine.health_timeout_s
        ended = asyncio.ensure_future(self.worker.exit_reason())
        try:
            while not ended.done():
                self._alive = alive = self.worker.future()
                self.worker.send(EngineWorker.ping)
                await self._answered(alive)
                await asyncio.wait([ended], timeout=limit_s / 4)
            return ended.result()
        except WorkerDied as died:
            return self._fault or str(died)
        finally:
            ended.cancel()

    async def _answered(self, answer: asyncio.Future[None]) -> None:
        """Wait for an answer. A process silent for `engine.health_timeout_s` is killed. Raises a
        WorkerDied."""
        limit_s, asked_s = self.job.engine.health_timeout_s, now()
        while not answer.done():
            left_s = max(asked_s, self._heard_s) + limit_s - now()
            if left_s <= 0:
                limit = f"{limit_s:g} s (engine.health_timeout_s)"
                self._fault = f"{self.worker.name} did not answer for {limit} and was killed"
                self.worker.kill()
                raise WorkerDied(self._fault)
            await asyncio.wait([answer], timeout=left_s)
        answer.result()

    def _on_event(self, event: Report | Alive) -> None:
        self._heard_s = now()
        if isinstance(event, Report):
            self._usage = event.usage
            self._on_report(event)
        elif self._alive is not None and not self._alive.done():
            self._alive.set_result(None)

    def _on_report(self, report: Report) -> None:
        """Handle new tokens and aborts."""
        raise NotImplementedError


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


class RemoteEngine(EngineClient):
    """One process of the embedded engine (contracts/engine.py).

    Once the process has ended, every method raises EngineDied.
    """

    def __init__(self, worker: RemoteWorker, job: EngineJob) -> None:
        super().__init__(worker, job)
        drafts = job.engine.drafts != "off"
        self.capabilities = Capabilities(
            exact_versions=True,
            sleep=True,
            scores=True,
            top_p=True,
            drafts=drafts,
            references=drafts,
            verifies=True,
        )
        self.counter = TokenCounter()
        self.arrival: Arrival | None = None
        self._requests: dict[str, _Request] = {}
        self._receiver = Receiver(worker.name)
        self.transfers = Transfers(_is_in_files)
        """The trainer's; the owner sets them."""

    async def generate(self, sample: Sample) -> None:
        """Extend the sample until it ends. A cancelled call returns once the engine has aborted the request
        and all tokens are in the sample. Cancelling it again in the meantime has no effect."""
        id, ids = str(sample.id), sample.turn_ids
        with _deaths():
            request = GenerationRequest(
                id,
                sample.turn_context_ids,
                ids,
                sample.turn_seed,
                sample.greedy,
                sampling=sample.sampling,
                temperature=sample.temperature,
                top_p=sample.top_p,
                max_completion_tokens=len(ids) + self.job.sampling.room(sample),
                pin=sample.pin,
                references=sample.references if self.capabilities.references else (),
                max_age=sample.max_age,
                oldest_version=sample.turn_version,
            )
            self.worker.send(EngineWorker.submit, request)
            self._requests[id] = served = _Request(sample, self.worker.future())
            try:
                await served.ended
            except asyncio.CancelledError:
                with suppress(WorkerDied):  # then there is nothing more to come
                    await self._abort(id, served)
                raise
            finally:
                del self._requests[id]

    async def load(self, weights: Weights, *, kv: KV) -> None:
        """Load weights between two decode steps. Raises a WeightsRefused before the engine is asked, if they
        are not those of the model."""
        if weights.tensors:
            check_tensors(weights.tensors, self._expected)
        await self.transfers.load(weights, self._receiver, partial(self._load, kv))

    async def score(self, ids: Sequence[int], num_prefix: int) -> list[float]:
        """Return the log-probs of a probe after its prefix."""
        with _deaths():
            return await self.worker.call(EngineWorker.score, list(ids), num_prefix)

    async def sleep(self) -> None:
        with _deaths():
            await self.worker.call(EngineWorker.sleep)

    async def wake(self) -> None:
        with _deaths():
            await self.worker.call(EngineWorker.wake)

    def usage(self) -> Usage:
        """Return the usage in the engine's last report: at most `report_every_s` ago while it generates, and
        exact once all requests have ended. A process that has ended cannot tell its own count any more."""
        num_counted = None if self.worker.has_ended else self._usage.num_counted
        return msgspec.structs.replace(self._usage, num_generated=self.counter.num, num_counted=num_counted)

    @cached_property
    def _expected(self) -> tuple[TensorInfo, ...]:
        if self.job.adapter:
            return adapter_tensors(self.job.model, self.job.adapter)
        return expected_tensors(self.job.model, self.job.engine.dtype)

    async def _load(self, kv: KV, weights: Weights, link: Link) -> None:
        with _deaths():
            self.arrival = await self.worker.call(EngineWorker.load, weights, link, kv)

    async def _abort(self, id: str, request: _Request) -> None:
        """Returns once the tokens are here. A cancellation takes effect after it."""
        request.aborted = self.worker.future()
        self.worker.send(EngineWorker.abort, id)
        with waiting(f"{self.worker.name}: abort"):
            await ended(answered := asyncio.ensure_future(self._answered(request.aborted)))
        answered.result()

    @override
    def _on_report(self, report: Report) -> None:
        for output in report.outputs:
            request = self._requests.get(output.id)
            if request is None:  # submitted at its limit, and aborted before the engine looked at it
                assert not output.ids, output
                continue
            self.counter.add(len(output.ids))
            if (verified := output.verified_logprobs) is not None:
                request.sample.verify(len(verified), output.version, verified)
            request.sample.extend(output.ids, output.behavior_logprobs, output.version)
            if output.finish_reason is not None:
                request.sample.end_turn(output.finish_reason)
                if not request.ended.done():
                    request.ended.set_result(None)
        for id in report.refused:
            if (request := self._requests.get(id)) and not request.ended.done():
                request.ended.set_exception(VersionGone(f"{self.worker.name} does not have its version"))
        for id in report.aborted:
            aborted = self._requests[id].aborted
            if aborted is not None and not aborted.done():
                aborted.set_result(None)


async def _is_in_files(weights: Weights, link: Link) -> None:
    if weights.is_streamed:
        raise TransferFailed(f"{link.names}: no trainer sends the weights of {weights.location}")


@contextmanager
def _deaths() -> Iterator[None]:
    """Turn WorkerDied into EngineDied: the sample keeps its tokens, and another engine continues it."""
    try:
        yield
    except WorkerDied as died:
        raise EngineDied(str(died)) from died
