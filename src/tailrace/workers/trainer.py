"""The controller's side of the trainer process. Samples are sent to it; weights never come here."""

import asyncio
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tailrace.errors import TransferFailed
from tailrace.trainer.base import StepStats
from tailrace.trainer.batch import TrainingSample
from tailrace.types import Sample
from tailrace.weights.base import Link, Weights
from tailrace.workers import messages
from tailrace.workers.conversation import Conversation
from tailrace.workers.messages import Done, FromTrainer, TrainerJob
from tailrace.workers.remote import RemoteWorker


class RemoteTrainer(RemoteWorker[TrainerJob]):
    """A Trainer (trainer/base.py) in its own process."""

    module = "tailrace.workers.trainer_child"
    decoder = msgspec.msgpack.Decoder(FromTrainer)
    _published: Weights | None = None

    def __init__(self, process: Conversation, job: TrainerJob) -> None:
        super().__init__(process, job)
        process.on_message = self._on_message
        self._numbers = itertools.count()
        self._sending: dict[int, asyncio.Future[str | None]] = {}

    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replica: int | None = None
    ) -> None:
        """As Trainer.accumulate."""
        await self.process.ask(messages.Accumulate(_training_samples(units, version)), Done)

    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        """As Trainer.ess."""
        return (await self.process.ask(messages.Ess(_training_samples(units, version)), messages.EssOf)).share

    async def logprobs(self, sample: Sample) -> list[float]:
        """The log-probs of a sample's completion tokens under the current weights, at the sampling
        temperature."""
        return (await self.process.ask(messages.Refer(TrainingSample.of(sample)), messages.Referred)).logprobs

    async def step(self) -> StepStats:
        """As Trainer.step.

        Raises:
            ScheduleError: nothing was accumulated.
        """
        return (await self.process.ask(messages.Step(), messages.Stepped)).stats

    async def publish(self, version: int) -> Weights:
        """As Trainer.publish, by the configured transport."""
        answer = await self.process.ask(messages.Publish(version), messages.Published)
        self._published = answer.weights
        return answer.weights

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

    async def save(self, folder: Path) -> None:
        """As Trainer.save."""
        await self.process.ask(messages.Save(str(folder)), Done)

    async def restore(self, folder: Path) -> None:
        """As Trainer.restore. The engines get the weights with the next publication."""
        await self.process.ask(messages.Restore(str(folder)), Done)

    async def close(self) -> None:
        """End the process and remove the published weights."""
        try:
            await super().close()
        finally:
            # A process that was killed did not remove its folder.
            if self._published is not None and self.job.weights.transport == "shared_memory":
                shutil.rmtree(Path(self._published.location).parent, ignore_errors=True)

    def _on_message(self, message: msgspec.Struct) -> None:
        if not isinstance(message, messages.Sent):
            self.process.answer(message)
        elif (sent := self._sending.get(message.number)) is not None and not sent.done():
            sent.set_result(message.failure)


def _training_samples(units: Sequence[Sequence[Sample]], version: int) -> list[list[TrainingSample]]:
    return [[TrainingSample.of(sample, published=version) for sample in unit] for unit in units]
