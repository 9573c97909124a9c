"""The controller's side of the trainer's processes. Samples are sent to them; weights never come here.

Every message goes to all processes that it concerns: the ranks of one replica get the same messages in the
same order. Rank 0 of replica 0 publishes the weights and sends them.
"""

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tailrace.errors import CheckpointError, TransferFailed, WorkerDied
from tailrace.trainer.base import StepStats
from tailrace.trainer.batch import TrainingSample
from tailrace.types import Sample
from tailrace.weights.base import Link, Weights
from tailrace.workers import messages
from tailrace.workers.conversation import Answer, Conversation
from tailrace.workers.messages import Done, FromTrainer, TrainerJob
from tailrace.workers.remote import RemoteWorker

BLAME_S = 2.0
"""Seconds after the first failed collective in which a process may end and show why."""


class TrainerProcess(RemoteWorker[TrainerJob]):
    """One process of the trainer."""

    module = "tailrace.workers.trainer_child"
    decoder = msgspec.msgpack.Decoder(FromTrainer)
    published: Weights | None = None
    """What it has published last."""

    def __init__(self, process: Conversation, job: TrainerJob) -> None:
        super().__init__(process, job)
        process.on_message = self._on_message
        self.listening: asyncio.Future[messages.Listening] = process.promise()
        self.stranded: asyncio.Future[messages.Stranded] = process.promise()
        self._written: asyncio.Future[str | None] = process.promise()
        self._numbers = itertools.count()
        self._sending: dict[int, asyncio.Future[str | None]] = {}

    async def send(self, weights: Weights, link: Link) -> None:
        """The trainer's half of a transfer (weights/base.py); it runs beside other work of the process.

        Raises:
            TransferFailed: the engine did not take the weights.
        """
        if not weights.is_streamed:
            return
        number = next(self._numbers)
        self._sending[number] = sent = self.process.promise()
        try:
            self.process.send(messages.Send(number, weights.version, link))
            failure = await sent
        finally:
            del self._sending[number]
        if failure is not None:
            raise TransferFailed(failure)

    def next_written(self) -> "asyncio.Future[str | None]":
        """Return a future of how the next checkpoint fails; None: it does not."""
        self._written = self.process.promise()
        return self._written

    async def close(self) -> None:
        """End the process and remove the published weights."""
        try:
            await super().close()
        finally:
            # A process that was killed did not remove its folder.
            if self.published is not None and self.job.weights.transport == "shared_memory":
                shutil.rmtree(Path(self.published.location).parent, ignore_errors=True)

    def _on_message(self, message: msgspec.Struct) -> None:
        match message:
            case messages.Sent(number=number, failure=failure):
                if (sent := self._sending.get(number)) is not None and not sent.done():
                    sent.set_result(failure)
            case messages.Written(failure=failure):
                if not self._written.done():
                    self._written.set_result(failure)
            case messages.Listening():
                self.listening.set_result(message)
            case messages.Stranded():
                if not self.stranded.done():  # training and writing a checkpoint may both fail
                    self.stranded.set_result(message)
            case _:
                self.process.answer(message)


def processes_of(job: TrainerJob) -> list[tuple[str, TrainerJob]]:
    """Return the name and the job of each process of a trainer, replica by replica, rank by rank."""
    replicas, ranks = job.trainer.replicas, job.trainer.ranks
    if replicas * ranks == 1:
        return [("trainer", job)]
    return [
        (f"trainer-{replica}-{rank}", job.model_copy(update={"replica": replica, "rank": rank}))
        for replica in range(replicas)
        for rank in range(ranks)
    ]


class RemoteTrainer:
    """A Trainer (trainer/base.py) of one or several processes.

    Args:
        processes: replica by replica, rank by rank, as `processes_of`. They may still be starting.
    """

    def __init__(self, processes: Sequence[TrainerProcess]) -> None:
        self.processes = tuple(processes)
        self._first = processes[0]
        settings = self._first.job.trainer
        self._replicas = [
            self.processes[start : start + settings.ranks]
            for start in range(0, len(processes), settings.ranks)
        ]
        self._given = [0] * settings.replicas
        """Tokens of divided units that each replica was given since the last step."""
        self._first.listening.add_done_callback(self._let_join)
        for each in processes:
            each.stranded.add_done_callback(self._find_missing)

    async def ready(self) -> None:
        """Wait until all processes have loaded the model. Raises as RemoteWorker.ready."""
        await asyncio.gather(*(each.ready() for each in self.processes))

    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replica: int | None = None
    ) -> None:
        """As Trainer.accumulate. Without a replica, each unit goes to the one with the fewest tokens since
        the last step, the largest unit first. What one replica was given alone does not count: the others
        were not there."""
        shares = zip(self._replicas, self._divide(units, replica), strict=True)
        await asyncio.gather(
            *(
                _ask(ranks, messages.Accumulate(_training_samples(share, version)), Done)
                for ranks, share in shares
                if share
            )
        )

    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        """As Trainer.ess, by replica 0."""
        message = messages.Ess(_training_samples(units, version))
        return (await _ask(self._replicas[0], message, messages.EssOf))[0].share

    async def logprobs(self, sample: Sample) -> list[float]:
        """The log-probs of a sample's completion tokens under the current weights, at the sampling
        temperature."""
        message = messages.Refer(TrainingSample.of(sample))
        return (await _ask(self._replicas[0], message, messages.Referred))[0].logprobs

    async def reference_logprobs(self, sample: Sample) -> list[float]:
        """As `logprobs`, under the model that LoRA began with."""
        message = messages.Refer(TrainingSample.of(sample), without_adapter=True)
        return (await _ask(self._replicas[0], message, messages.Referred))[0].logprobs

    async def step(self) -> StepStats:
        """As Trainer.step. `compute_s` is that of the slowest process.

        Raises:
            ScheduleError: nothing was accumulated.
        """
        self._given = [0] * len(self._given)
        answers = await _ask(self.processes, messages.Step(), messages.Stepped)
        firsts = [answer.stats for answer in answers[:: len(self._replicas[0])]]
        samples = tuple(itertools.chain.from_iterable(stats.samples for stats in firsts))
        compute_s = max(answer.stats.compute_s for answer in answers)
        return replace(firsts[0], samples=samples, compute_s=compute_s)

    async def publish(self, version: int) -> Weights:
        """As Trainer.publish, by the configured transport."""
        answers = await _ask(self.processes, messages.Publish(version), messages.Published)
        self._first.published = answers[0].weights
        return answers[0].weights

    async def release(self) -> None:
        """As Trainer.release."""
        await _ask(self.processes, messages.Release(), Done)

    async def send(self, weights: Weights, link: Link) -> None:
        """As TrainerProcess.send."""
        await self._first.send(weights, link)

    async def save(self, folder: Path) -> Awaitable[None]:
        """As Trainer.save, by replica 0."""
        written = [each.next_written() for each in self._replicas[0]]
        await _ask(self._replicas[0], messages.Save(str(folder)), Done)

        async def complete() -> None:
            for failure in await asyncio.gather(*written):
                if failure is not None:
                    raise CheckpointError(failure)

        completed = asyncio.ensure_future(complete())
        # asyncio reports an error that nobody awaits, and a run that fails awaits no checkpoint.
        completed.add_done_callback(lambda done: done.cancelled() or done.exception())
        return completed

    async def restore(self, folder: Path) -> None:
        """As Trainer.restore. The engines get the weights with the next publication."""
        await _ask(self.processes, messages.Restore(str(folder)), Done)

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(each.close() for each in self.processes))

    def _divide(self, units: Sequence[Sequence[Sample]], replica: int | None) -> list[list[Sequence[Sample]]]:
        """The units of each replica, in their order."""
        sizes = [sum(each.num_sequence_tokens for each in unit) for unit in units]
        owners = [0] * len(units)
        for index in sorted(range(len(units)), key=lambda index: -sizes[index]):
            owners[index] = self._given.index(min(self._given)) if replica is None else replica
            if replica is None:
                self._given[owners[index]] += sizes[index]
        return [
            [unit for unit, owner in zip(units, owners, strict=True) if owner == number]
            for number in range(len(self._given))
        ]

    def _let_join(self, listening: "asyncio.Future[messages.Listening]") -> None:
        """Tell the other processes where the first one listens."""
        if listening.cancelled() or listening.exception():
            return
        address = listening.result()
        for each in self.processes[1:]:
            with suppress(WorkerDied):  # the run ends with it
                each.process.send(messages.Join(address.host, address.port))

    def _find_missing(self, stranded: "asyncio.Future[messages.Stranded]") -> None:
        """A collective has failed. End the processes that did not take part, unless one ends by itself."""
        if not stranded.cancelled() and not stranded.exception():
            asyncio.get_running_loop().call_later(BLAME_S, self._end_missing)

    def _end_missing(self) -> None:
        if any(each.process.has_ended for each in self.processes):
            return
        limit = f"{self._first.job.trainer.collective_timeout_s:g} s (trainer.collective_timeout_s)"
        missing = [each for each in self.processes if not each.stranded.done()]
        for each in missing:
            each.process.abort(f"did not take part in a collective within {limit}")
        if not missing:
            self._first.process.abort(f"failed in a collective: {self._first.stranded.result().error}")


class AdapterOff:
    """A Reference (trainer/base.py): the model of a trainer with LoRA, without the adapter. It needs no
    process and no memory of its own; the trainer computes between its other work."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    async def logprobs(self, sample: Sample) -> list[float]:
        """As Reference.logprobs."""
        return await self._trainer.reference_logprobs(sample)


def _ask(
    processes: Sequence[TrainerProcess], message: msgspec.Struct, kind: type[Answer]
) -> "asyncio.Future[list[Answer]]":
    """Ask processes now, so that all of them are asked everything in one order."""
    answers: list[Coroutine[Any, Any, Answer]] = []
    try:
        for each in processes:
            answers.append(each.process.asked(message, kind))
    except WorkerDied:
        for answer in answers:
            answer.close()  # otherwise Python warns that it was never awaited
        raise
    return asyncio.gather(*answers)


def _training_samples(units: Sequence[Sequence[Sample]], version: int) -> list[list[TrainingSample]]:
    return [[TrainingSample.of(sample, published=version) for sample in unit] for unit in units]
