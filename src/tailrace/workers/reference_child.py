"""The process of the reference model: computes one batch after another."""

import msgspec

from tailrace.trainer.reference import TorchReference
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.child import begin, config_errors_sent, end_with_controller
from tailrace.workers.messages import Ready, Refer, ReferenceJob, Referred


def main() -> None:
    """The entry point of the process."""
    end, job = begin(ReferenceJob)
    end_with_controller(end)
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(Refer))
    with config_errors_sent(channel):
        reference = TorchReference.load(job.model, job.trainer, temperature=job.temperature)
    channel.send(Ready())
    for batch in channel:
        channel.send(Referred(reference.logprobs(batch.samples)))


if __name__ == "__main__":
    main()
