"""The process of the reference model. What arrives while a batch is computed is the next batch."""

import msgspec

from tailrace.trainer.reference import TorchReference
from tailrace.workers.channel import WorkerChannel, WorkerEnd
from tailrace.workers.child import begin, config_errors_sent, end_with_controller
from tailrace.workers.messages import Ready, Refer, ReferenceJob, Referred


def serve(job: ReferenceJob, channel: WorkerEnd[Refer]) -> None:
    """Load the model and answer until the controller says no more."""
    with config_errors_sent(channel):
        reference = TorchReference.load(job.model, job.trainer, temperature=job.temperature)
    channel.send(Ready())
    while (asked := channel.receive(wait=True)) is not None:
        for logprobs in reference.logprobs([message.sample for message in asked]):
            channel.send(Referred(logprobs))


def main() -> None:
    end, job = begin(ReferenceJob)
    end_with_controller(end)
    serve(job, WorkerChannel(end, msgspec.msgpack.Decoder(Refer)))


if __name__ == "__main__":
    main()
