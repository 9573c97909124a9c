"""The trainer's process: does one thing after another, and sleeps in the socket in between."""

import shutil
from pathlib import Path

import msgspec

from tailrace.errors import CheckpointError, ScheduleError
from tailrace.trainer.passes import Passes
from tailrace.trainer.torch_trainer import TorchTrainer
from tailrace.weights.shared_memory import SharedWeights, own_folder
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.child import begin, config_errors_sent, end_with_controller
from tailrace.workers.messages import (
    Accumulate,
    Done,
    Ess,
    EssOf,
    FromTrainer,
    Publish,
    Published,
    Refused,
    Restore,
    Save,
    Step,
    Stepped,
    ToTrainer,
    TrainerJob,
    TrainerReady,
)


def obey(message: ToTrainer, trainer: TorchTrainer, shared: SharedWeights) -> FromTrainer:
    """Do what was asked, and say what came of it."""
    match message:
        case Accumulate(units=units, num_helpers=num_helpers):
            trainer.accumulate(units, num_helpers=num_helpers)
        case Ess(units=units):
            return EssOf(trainer.ess(units))
        case Step(num_helpers=num_helpers):
            return Stepped(trainer.step(num_helpers=num_helpers))
        case Publish(version=version):
            return Published(shared.write(trainer.publish(), version))
        case Save(folder=folder):
            trainer.save(Path(folder))
        case Restore(folder=folder):
            trainer.restore(Path(folder))
    return Done()


def serve(job: TrainerJob, channel: WorkerChannel[ToTrainer], folder: Path) -> None:
    """Do what is asked until the controller says no more. folder: in shared memory."""
    with config_errors_sent(channel):
        passes = Passes.load(
            job.model,
            job.trainer,
            job.algorithm,
            temperature=job.sampling.temperature,
            max_tokens=job.sampling.max_completion_tokens,
        )
        trainer = TorchTrainer(passes)
    shared = SharedWeights(folder)
    channel.send(TrainerReady(str(folder)))
    for message in channel:
        try:
            channel.send(obey(message, trainer, shared))
        except (CheckpointError, ScheduleError) as error:
            channel.send(Refused.of(error))


def main() -> None:
    end, job = begin(TrainerJob)
    with own_folder() as folder:
        end_with_controller(end, clean_up=lambda: shutil.rmtree(folder, ignore_errors=True))
        serve(job, WorkerChannel(end, msgspec.msgpack.Decoder(ToTrainer)), folder)


if __name__ == "__main__":
    main()
