"""The controller's side of the trainer process. Samples are sent to it; weights never come here."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tailrace.trainer.base import StepStats
from tailrace.trainer.batch import TrainingSample
from tailrace.types import Sample
from tailrace.weights.base import Weights
from tailrace.workers import messages
from tailrace.workers.messages import Done, FromTrainer, TrainerJob
from tailrace.workers.process import RemoteWorker


class RemoteTrainer(RemoteWorker[TrainerJob]):
    """A Trainer (trainer/base.py) in its own process."""

    module = "tailrace.workers.trainer_child"
    decoder = msgspec.msgpack.Decoder(FromTrainer)
    _published: Weights | None = None

    async def accumulate(self, units: Sequence[Sequence[Sample]], *, version: int) -> None:
        """As Trainer.accumulate."""
        await self.process.ask(messages.Accumulate(_training_samples(units, version)), Done)

    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        """As Trainer.ess."""
        return (await self.process.ask(messages.Ess(_training_samples(units, version)), messages.EssOf)).share

    async def step(self) -> StepStats:
        """As Trainer.step.

        Raises:
            ScheduleError: nothing was accumulated.
        """
        return (await self.process.ask(messages.Step(), messages.Stepped)).stats

    async def publish(self, version: int) -> Weights:
        """As Trainer.publish. The weights are a file in shared memory; old versions of it are deleted."""
        answer = await self.process.ask(messages.Publish(version), messages.Published)
        self._published = answer.weights
        return answer.weights

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
            if self._published is not None:  # a process that was killed did not remove its folder
                shutil.rmtree(Path(self._published.location).parent, ignore_errors=True)


def _training_samples(units: Sequence[Sequence[Sample]], version: int) -> list[list[TrainingSample]]:
    return [[TrainingSample.of(sample, published=version) for sample in unit] for unit in units]
