"""A process of the trainer: executes one message after another, and sends weights beside them."""

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from tailrace.errors import CheckpointError, ScheduleError, TransferFailed
from tailrace.trainer.adapter import peft_config
from tailrace.trainer.distributed import Ranks, is_lost_peer, joined, listen
from tailrace.trainer.trainer import TorchTrainer
from tailrace.weights.base import Weights, WeightSender
from tailrace.weights.tensors import Publisher
from tailrace.weights.transports import open_sender
from tailrace.workers import messages
from tailrace.workers.channel import WorkerChannel, WorkerEnd
from tailrace.workers.child import (
    begin,
    config_errors_sent,
    end_with_controller,
    give_memory_back,
    return_freed_tensors,
)
from tailrace.workers.messages import Done, FromTrainer, Ready, Refused, ToTrainer, TrainerJob

Tensors = Iterable[tuple[str, Tensor]]
Publish = Callable[[Tensors, int], FromTrainer]


def execute(message: ToTrainer, trainer: TorchTrainer, publish: Publish) -> FromTrainer:
    """Execute a message and return its answer.

    Args:
        publish: publishes weights and returns the answer.

    Raises:
        CheckpointError: a checkpoint cannot be written or read.
        ScheduleError: a step without accumulated samples.
        TransferFailed: there is no room for published weights.
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
            return publish(trainer.publish(), version)
        case messages.Release():
            give_memory_back()
        case messages.Restore(folder=folder):
            trainer.restore(Path(folder))
    return Done()


def in_turn(channel: WorkerEnd[ToTrainer], sender: WeightSender | None) -> Iterator[ToTrainer]:
    """The messages that are executed one after another. A `Send` is executed when it arrives: an engine that
    loads does nothing else, and what is sent is a copy."""
    others: queue.SimpleQueue[ToTrainer | Exception | None] = queue.SimpleQueue()

    def read() -> None:
        end = None
        try:
            for message in channel:
                if isinstance(message, messages.Send):
                    assert sender is not None
                    # The peer decides when a thread ends.
                    threading.Thread(target=send, args=(message, sender, channel), daemon=True).start()
                else:
                    others.put(message)
        except Exception as error:
            end = error
        others.put(end)

    threading.Thread(target=read, name="messages", daemon=True).start()
    while (message := others.get()) is not None:
        if isinstance(message, Exception):
            raise message
        yield message


def send(message: messages.Send, sender: WeightSender, channel: WorkerEnd[ToTrainer]) -> None:
    """Send weights to an engine, and the outcome to the controller."""
    failure = None
    try:
        sender.send(message.version, message.link)
    except TransferFailed as error:
        failure = str(error)
    channel.send(messages.Sent(message.number, failure))


def save(message: messages.Save, trainer: TorchTrainer, channel: WorkerEnd[ToTrainer], beside: bool) -> Done:
    """Begin a checkpoint. Its outcome goes to the controller.

    Args:
        beside: a thread writes it.

    Raises:
        CheckpointError: it cannot be begun.
    """
    write = trainer.save(Path(message.folder))
    if beside:
        threading.Thread(target=write_checkpoint, args=(write, channel), daemon=True).start()
    else:
        write_checkpoint(write, channel)
    return Done()


def write_checkpoint(write: Callable[[], None], channel: WorkerEnd[ToTrainer]) -> None:
    """Write a checkpoint, and send the outcome to the controller."""
    failure = None
    try:
        write()
    except CheckpointError as error:
        failure = str(error)
    except Exception as error:
        traceback.print_exc()
        if is_lost_peer(error):
            channel.send(messages.Stranded(str(error)))
            return
        failure = f"the checkpoint cannot be written ({type(error).__name__}: {error}); see the log above"
    channel.send(messages.Written(failure))


def open_transport(job: TrainerJob, channel: WorkerEnd[ToTrainer]) -> WeightSender:
    """Open the configured transport; a ConfigError goes to the controller and ends the process."""
    with config_errors_sent(channel):
        adapter = job.trainer.adapter
        config = peft_config(job.model, adapter) if adapter else None
        return open_sender(job.weights, job.model, config, job.trainer.device)


def serve(job: TrainerJob, channel: WorkerEnd[ToTrainer]) -> None:
    """Load the model and execute messages until the controller says no more."""
    with closing(open_transport(job, channel)) as sender:
        serve_by(sender, job, channel)


def serve_by(sender: WeightSender | None, job: TrainerJob, channel: WorkerEnd[ToTrainer]) -> None:
    """As `serve`, with a transport; None: another process of the trainer has it."""
    received = in_turn(channel, sender)
    if job.is_alone:
        serve_as(None, sender, job, channel, received)
        return
    with failures_told_apart(channel, received):
        store = find_others(job, channel, received)
        place = joined(job.trainer, store, replica=job.replica, rank=job.rank)
        with place as ranks, failures_told_apart(channel, received):
            serve_as(ranks, sender, job, channel, received)


def serve_as(
    ranks: Ranks | None,
    sender: WeightSender | None,
    job: TrainerJob,
    channel: WorkerEnd[ToTrainer],
    received: Iterator[ToTrainer],
) -> None:
    """As `serve_by`, at a place among the trainer's processes; None: it is alone."""
    with config_errors_sent(channel):
        trainer = TorchTrainer.load(
            job.model,
            job.trainer,
            job.algorithm,
            temperature=job.sampling.temperature,
            max_completion_tokens=job.sampling.max_completion_tokens,
            ranks=ranks,
        )
    torch.manual_seed(job.seed + job.replica * job.trainer.ranks + job.rank)
    publish = publish_by(sender, job, trainer)
    give_memory_back()  # a file of weights is read twice
    channel.send(Ready())
    for message in received:
        try:
            if isinstance(message, messages.Save):
                channel.send(save(message, trainer, channel, job.trainer.async_checkpoints))
                continue
            channel.send(execute(message, trainer, publish))
        except (CheckpointError, ScheduleError, TransferFailed) as error:
            channel.send(Refused.of(error))


def publish_by(sender: WeightSender | None, job: TrainerJob, trainer: TorchTrainer) -> Publish:
    """How this process publishes. Without a sender it only helps its replica to gather the weights."""
    if sender is not None:
        publisher = Publisher(sender, job.published_dtype, trainer.weights())
        return lambda tensors, version: messages.Published(publisher.publish(tensors, version))

    def help_to_gather(tensors: Tensors, version: int) -> FromTrainer:
        if job.replica == 0:
            for _ in tensors:
                pass
        return messages.Published(Weights(version))

    help_to_gather(trainer.weights(), 0)
    return help_to_gather


def find_others(job: TrainerJob, channel: WorkerEnd[ToTrainer], received: Iterator[ToTrainer]) -> TCPStore:
    """Return the store through which the trainer's processes find one another."""
    if job.listens:
        store = listen(job.host)
        channel.send(messages.Listening(job.host, store.port))
        return store
    for message in received:
        assert isinstance(message, messages.Join), message
        return TCPStore(message.host, message.port, is_master=False)
    sys.exit()  # the controller has ended


@contextmanager
def failures_told_apart(channel: WorkerEnd[ToTrainer], received: Iterator[ToTrainer]) -> Iterator[None]:
    """Tell the controller when a collective fails, and wait for the end: the cause is in another process.
    After any other error end at once, before this process leaves the others."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        if not is_lost_peer(error):
            os._exit(1)
        channel.send(messages.Stranded(str(error)))
        for _ in received:
            pass


def main() -> None:
    end, job = begin(TrainerJob)
    return_freed_tensors()
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(ToTrainer))
    if not job.listens:
        end_with_controller(end)
        serve_by(None, job, channel)
        return
    with closing(open_transport(job, channel)) as sender:
        end_with_controller(end, clean_up=sender.close)
        serve_by(sender, job, channel)


if __name__ == "__main__":
    main()
