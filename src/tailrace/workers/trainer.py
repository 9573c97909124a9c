"""The trainer, as the controller sees it. Samples go there; weights never come here."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tailrace.trainer.base import StepStats
from tailrace.trainer.wire import TrainingSample
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
    """A Trainer (trainer/base.py) in a process of its own.

    Every verb raises WorkerDied if the process ends.
    """

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self._shared: str | None = None
        self.lent: Callable[[], int] = lambda: 0
        """CPUs of others that nobody uses now: so many helpers may take part."""
        self._published = 0
        """The version of the last publication that it was asked for: what it is asked next comes after it."""

    @classmethod
    async def spawn(cls, job: TrainerJob, *, logs: Path, pin: int | None = None) -> "RemoteTrainer":
        """Start the process; `ready` waits until it has loaded the model."""
        decoder = msgspec.msgpack.Decoder(FromTrainer)
        module = "tailrace.workers.trainer_child"
        threads = job.trainer.threads
        return cls(
            await WorkerProcess.spawn("trainer", module, job, decoder, logs=logs, threads=threads, pin=pin)
        )

    async def ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ConfigError: it cannot be.
        """
        answer = await self.process.answered(TrainerReady, "the trainer to load the model")
        self._shared = answer.shared

    async def accumulate(self, units: Sequence[Sequence[Sample]]) -> None:
        """As Trainer.accumulate."""
        await self.process.ask(Accumulate(self._train_samples(units), self.lent()), Done)

    async def ess(self, units: Sequence[Sequence[Sample]]) -> float:
        """As Trainer.ess."""
        return (await self.process.ask(Ess(self._train_samples(units)), EssOf)).share

    async def step(self) -> StepStats:
        """As Trainer.step.

        Raises:
            ScheduleError: nothing was accumulated.
        """
        return (await self.process.ask(Step(self.lent()), Stepped)).stats

    async def publish(self, version: int) -> Weights:
        """As Trainer.publish: the weights are a file in shared memory, and this is its name. The file
        lives until three more versions are published."""
        self._published = version
        return (await self.process.ask(Publish(version), Published)).weights

    async def save(self, folder: Path) -> None:
        """As Trainer.save."""
        await self.process.ask(Save(str(folder)), Done)

    async def restore(self, folder: Path) -> None:
        """As Trainer.restore. The engines learn of it by the next publish and load."""
        await self.process.ask(Restore(str(folder)), Done)

    async def close(self) -> None:
        """End the process and remove the published weights."""
        try:
            await self.process.close()
        finally:
            if self._shared is not None:  # it was killed: otherwise it did so itself
                shutil.rmtree(self._shared, ignore_errors=True)

    def _train_samples(self, units: Sequence[Sequence[Sample]]) -> list[list[TrainingSample]]:
        return [[TrainingSample.of(sample, published=self._published) for sample in unit] for unit in units]
