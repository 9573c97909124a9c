"""The controller's side of the reference process.

It sends one batch at a time: all samples that finished while the one before was computed.
"""

import asyncio
from pathlib import Path

import msgspec

from tailrace.clock import waiting
from tailrace.trainer.batch import TrainingSample
from tailrace.types import Sample
from tailrace.workers.messages import FromReference, Ready, Refer, ReferenceJob, Referred
from tailrace.workers.process import WorkerProcess

Outcome = asyncio.Future[list[float]]


class RemoteReference:
    """A Reference (trainer/base.py) in its own process."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self._asked: list[tuple[TrainingSample, Outcome]] = []
        """The samples of the next batch."""
        self._computed: list[Outcome] = []
        """The outcomes of the batch that is being computed, in its order."""

    @classmethod
    async def spawn(cls, job: ReferenceJob, *, logs: Path) -> "RemoteReference":
        """Start the process. `ready` waits until it has loaded the model."""
        decoder = msgspec.msgpack.Decoder(FromReference)
        module = "tailrace.workers.reference_child"
        threads = job.trainer.threads
        return cls(await WorkerProcess.spawn("reference", module, job, decoder, logs=logs, threads=threads))

    async def ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        await self.process.answered(Ready, "the reference model to load")
        self.process.on_message = self._hear

    async def logprobs(self, sample: Sample) -> list[float]:
        """As Reference.logprobs. Cancelling it does not cancel the batch.

        Raises:
            WorkerDied: the process ended.
        """
        outcome: Outcome = self.process.promise()
        self._asked.append((TrainingSample.of(sample), outcome))
        if not self._computed:
            self._send()
        with waiting("the reference model"):
            return await outcome

    async def close(self) -> None:
        """End the process."""
        await self.process.close()

    def _send(self) -> None:
        asked, self._asked = self._asked, []
        self._computed = [outcome for _, outcome in asked]
        self.process.send(Refer([sample for sample, _ in asked]))

    def _hear(self, message: msgspec.Struct) -> None:
        assert isinstance(message, Referred), message
        computed, self._computed = self._computed, []
        for outcome, logprobs in zip(computed, message.logprobs, strict=True):
            if not outcome.done():
                outcome.set_result(logprobs)
        if self._asked:
            self._send()
