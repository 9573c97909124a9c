"""The reference model in a process of its own, from both sides."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.worker import BatchWorker, Job, WorkerConnection, batched
from tailrace.types import Sample

if TYPE_CHECKING:
    from tailrace.drivers.trainer.model import PolicyModel


class ReferenceJob(Job):
    """Compute log-probs of samples under a frozen model."""

    model: Path
    trainer: TrainerSettings
    """Settings of the trainer; the reference uses its packing, device and precision."""
    temperature: float
    """Sampling temperature."""

    @override
    def folders(self) -> Mapping[str, Path]:
        return {"model.path": self.model}


class ReferenceWorker(BatchWorker):
    """A process of the reference model. What arrives while a batch is computed is the next batch."""

    job_type = ReferenceJob
    role = "reference"

    def __init__(self, reference: "PolicyModel") -> None:
        self._reference = reference

    @override
    @classmethod
    def load_job(cls, job: ReferenceJob, connection: WorkerConnection) -> "ReferenceWorker":
        from tailrace.drivers.trainer.model import PolicyModel

        return cls(PolicyModel.load(job.model, job.trainer, temperature=job.temperature))

    @batched
    def logprobs(self, samples: list[TrainingSample]) -> Iterable[list[float]]:
        """Compute the log-probs of each sample: [num_tokens]."""
        return self._reference.logprobs_of(samples)


class RemoteReference:
    """A Reference (contracts/trainer.py) in its own process."""

    def __init__(self, worker: RemoteWorker) -> None:
        self._worker = worker

    async def logprobs(self, sample: Sample) -> list[float]:
        """Compute log-probs under the reference. A call that is cancelled is computed nevertheless."""
        return await self._worker.call(ReferenceWorker.logprobs, TrainingSample.of(sample))
