"""The trainer's process: executes one message after another."""

import shutil
from pathlib import Path

import msgspec

from tailrace.errors import CheckpointError, ScheduleError
from tailrace.trainer.trainer import TorchTrainer
from tailrace.weights.shared_memory import SharedWeights, own_folder
from tailrace.workers import messages
from tailrace.workers.channel import WorkerChannel, WorkerEnd
from tailrace.workers.child import begin, config_errors_sent, end_with_controller
from tailrace.workers.messages import Done, FromTrainer, Ready, Refused, ToTrainer, TrainerJob


def execute(message: ToTrainer, trainer: TorchTrainer, shared: SharedWeights) -> FromTrainer:
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
        case messages.Publish(version=version):
            return messages.Published(shared.write(trainer.publish(), version))
        case messages.Save(folder=folder):
            trainer.save(Path(folder))
        case messages.Restore(folder=folder):
            trainer.restore(Path(folder))
    return Done()


def serve(job: TrainerJob, channel: WorkerEnd[ToTrainer]) -> None:
    """Load the model and execute messages until the controller says no more."""
    with own_folder() as folder:
        serve_from(folder, job, channel)


def serve_from(folder: Path, job: TrainerJob, channel: WorkerEnd[ToTrainer]) -> None:
    """As `serve`, with the published weights in a folder."""
    shared = SharedWeights(folder)
    with config_errors_sent(channel):
        trainer = TorchTrainer.load(
            job.model,
            job.trainer,
            job.algorithm,
            temperature=job.sampling.temperature,
            max_completion_tokens=job.sampling.max_completion_tokens,
        )
    channel.send(Ready())
    for message in channel:
        try:
            channel.send(execute(message, trainer, shared))
        except (CheckpointError, ScheduleError) as error:
            channel.send(Refused.of(error))


def main() -> None:
    end, job = begin(TrainerJob)
    with own_folder() as folder:
        end_with_controller(end, clean_up=lambda: shutil.rmtree(folder, ignore_errors=True))
        serve_from(folder, job, WorkerChannel(end, msgspec.msgpack.Decoder(ToTrainer)))


if __name__ == "__main__":
    main()
