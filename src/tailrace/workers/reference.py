"""The controller's side of the reference process."""

import msgspec

from tailrace.trainer.batch import TrainingSample
from tailrace.types import Sample
from tailrace.workers.messages import FromReference, Refer, ReferenceJob, Referred
from tailrace.workers.remote import RemoteWorker


class RemoteReference(RemoteWorker[ReferenceJob]):
    """A Reference (trainer/base.py) in its own process."""

    module = "tailrace.workers.reference_child"
    decoder = msgspec.msgpack.Decoder(FromReference)

    async def logprobs(self, sample: Sample) -> list[float]:
        """As Reference.logprobs. A call that is cancelled is computed nevertheless."""
        return (await self.process.ask(Refer(TrainingSample.of(sample)), Referred)).logprobs
