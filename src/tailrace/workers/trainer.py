"""The controller's side of the trainer process. Samples are sent to it; weights never come here."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tailrace.trainer.base import StepStats
from tailrace.trainer.batch import TrainingSample
from tailrace.types import Sample
from tailrace.weights.base import Weights
from tailrace.workers.messages import (
    Accumulate,
    Done,
    Ess,
    EssOf,
    FromTrainer,
    Publish,
    Published,
    Restore,
    Save,
    Step,
    Stepped,
    TrainerJob,
    TrainerReady,
)
from tailrace.workers.process import WorkerProcess


class RemoteTrainer:
    """A Trainer (trainer/base.py) in its own process.

    Every method raises WorkerDied if the process ends.
    """

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self._shared: str | None = None

    @classmethod
    async def spawn(cls, job: TrainerJob, *, logs: Path, pin: int | None = None) -> "RemoteTrainer":
        """Start the process. `ready` waits until it has loaded the model.

        Args:
            job: what to train.
            logs: folder of the process's log.
            pin: the CPU to run on; None: any.
        """
        decoder = msgspec.msgpack.Decoder(FromTrainer)
        module = "tailrace.workers.trainer_child"
        threads = job.trainer.threads
        return cls(
            await WorkerProcess.spawn("trainer", module, job, decoder, logs=logs, threads=threads, pin=pin)
        )

    async def ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ConfigError: the model cannot be trained.
        """
        answer = await self.process.answered(TrainerReady, "the trainer to load the model")
        self._shared = answer.shared

    async def accumulate(self, units: Sequence[Sequence[Sample]], *, version: int) -> None:
        """As Trainer.accumulate."""
        await self.process.ask(Accumulate(_training_samples(units, version)), Done)

    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        """As Trainer.ess."""
        return (await self.process.ask(Ess(_training_samples(units, version)), EssOf)).share

    async def step(self) -> StepStats:
        """As Trainer.step.

        Raises:
            ScheduleError: nothing was accumulated.
        """
        return (await self.process.ask(Step(), Stepped)).stats

    async def publish(self, version: int) -> Weights:
        """As Trainer.publish. The weights are a file in shared memory; old versions of it are deleted."""
        return (await self.process.ask(Publish(version), Published)).weights

    async def save(self, folder: Path) -> None:
        """As Trainer.save."""
        await self.process.ask(Save(str(folder)), Done)

    async def restore(self, folder: Path) -> None:
        """As Trainer.restore. The engines get the weights with the next publication."""
        await self.process.ask(Restore(str(folder)), Done)

    async def close(self) -> None:
        """End the process and remove the published weights."""
        try:
            await self.process.close()
        finally:
            if self._shared is not None:  # a process that was killed did not remove it itself
                shutil.rmtree(self._shared, ignore_errors=True)


def _training_samples(units: Sequence[Sequence[Sample]], version: int) -> list[list[TrainingSample]]:
    return [[TrainingSample.of(sample, published=version) for sample in unit] for unit in units]
