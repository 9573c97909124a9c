"""The process of the reference model. What arrives while a batch is computed is the next batch."""

import msgspec

from tailrace.trainer.reference import TorchReference
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.child import begin, config_errors_sent, end_with_controller
from tailrace.workers.messages import Ready, Refer, ReferenceJob, Referred


def main() -> None:
    end, job = begin(ReferenceJob)
    end_with_controller(end)
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(Refer))
    with config_errors_sent(channel):
        reference = TorchReference.load(job.model, job.trainer, temperature=job.temperature)
    channel.send(Ready())
    while (asked := channel.receive(wait=True)) is not None:
        for logprobs in reference.logprobs([message.sample for message in asked]):
            channel.send(Referred(logprobs))


if __name__ == "__main__":
    main()
