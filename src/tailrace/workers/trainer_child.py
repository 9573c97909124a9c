"""The trainer's process: executes one message after another, and sends weights beside them."""

import threading
from contextlib import closing
from pathlib import Path

import msgspec

from tailrace.errors import CheckpointError, ScheduleError, TransferFailed
from tailrace.trainer.trainer import TorchTrainer
from tailrace.weights.base import WeightSender
from tailrace.weights.tensors import Publisher
from tailrace.weights.transports import open_sender
from tailrace.workers import messages
from tailrace.workers.channel import WorkerChannel, WorkerEnd
from tailrace.workers.child import begin, config_errors_sent, end_with_controller
from tailrace.workers.messages import Done, FromTrainer, Ready, Refused, ToTrainer, TrainerJob


def execute(message: ToTrainer, trainer: TorchTrainer, publisher: Publisher) -> FromTrainer:
    """Execute a message and return its answer.

    Raises:
        CheckpointError: a checkpoint cannot be written or read.
        ScheduleError: a step without accumulated samples.
    """
    match message:
        case messages.Accumulate(units=units):
            trainer.accumulate(units)
        case messages.Ess(units=units):
            return messages.EssOf(trainer.ess(units))
        case messages.Step():
            return messages.Stepped(trainer.step())
        case messages.Refer(sample=sample, without_adapter=without_adapter):
            logprobs = trainer.reference_logprobs if without_adapter else trainer.logprobs
            return messages.Referred(logprobs(sample))
        case messages.Publish(version=version):
            return messages.Published(publisher.publish(trainer.publish(), version))
        case messages.Save(folder=folder):
            trainer.save(Path(folder))
        case messages.Restore(folder=folder):
            trainer.restore(Path(folder))
    return Done()


def send(message: messages.Send, sender: WeightSender, channel: WorkerEnd[ToTrainer]) -> None:
    """Send weights to an engine, and the outcome to the controller."""
    failure = None
    try:
        sender.send(message.version, message.link)
    except TransferFailed as error:
        failure = str(error)
    channel.send(messages.Sent(message.number, failure))


def open_transport(job: TrainerJob, channel: WorkerEnd[ToTrainer]) -> WeightSender:
    """Open the configured transport; a ConfigError goes to the controller and ends the process."""
    with config_errors_sent(channel):
        return open_sender(job.weights, job.model)


def serve(job: TrainerJob, channel: WorkerEnd[ToTrainer]) -> None:
    """Load the model and execute messages until the controller says no more."""
    with closing(open_transport(job, channel)) as sender:
        serve_by(sender, job, channel)


def serve_by(sender: WeightSender, job: TrainerJob, channel: WorkerEnd[ToTrainer]) -> None:
    """As `serve`, with a transport."""
    with config_errors_sent(channel):
        trainer = TorchTrainer.load(
            job.model,
            job.trainer,
            job.algorithm,
            temperature=job.sampling.temperature,
            max_completion_tokens=job.sampling.max_completion_tokens,
        )
    publisher = Publisher(sender, job.published_dtype, trainer.weights())
    channel.send(Ready())
    for message in channel:
        if isinstance(message, messages.Send):
            # What is sent is a copy, so the trainer may go on. The peer decides when a thread ends.
            threading.Thread(target=send, args=(message, sender, channel), daemon=True).start()
            continue
        try:
            channel.send(execute(message, trainer, publisher))
        except (CheckpointError, ScheduleError) as error:
            channel.send(Refused.of(error))


def main() -> None:
    end, job = begin(TrainerJob)
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(ToTrainer))
    with closing(open_transport(job, channel)) as sender:
        end_with_controller(end, clean_up=sender.close)
        serve_by(sender, job, channel)


if __name__ == "__main__":
    main()
