"""The order in which a process of the trainer executes what it is told."""

import socket

import msgspec
import torch

from tailrace.weights.base import ProcessGroupSettings, new_link
from tailrace.weights.process_group import ProcessGroupSender
from tailrace.weights.transports import WeightReceiver
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.messages import Accumulate, FromTrainer, Publish, Send, Sent, Step, ToTrainer
from tailrace.workers.trainer_child import in_turn


def test_weights_are_sent_while_the_trainer_executes_an_earlier_message() -> None:
    sender = ProcessGroupSender(ProcessGroupSettings(message_timeout_s=30))
    tensors = {"a": torch.arange(12.0)}
    weights, link = sender.publish(tensors, 1), new_link("engine-0")
    mine, theirs = socket.socketpair()
    with mine, theirs:
        controller = WorkerChannel(mine, msgspec.msgpack.Decoder(FromTrainer))
        received = in_turn(WorkerChannel(theirs, msgspec.msgpack.Decoder(ToTrainer)), sender)
        others = [Accumulate([]), Step(), Publish(2)]
        for message in (others[0], others[1], Send(7, 1, link), others[2]):
            controller.send(message)
        assert next(received) == others[0]
        assert torch.equal(WeightReceiver().receive(weights, link)["a"], tensors["a"])
        assert controller.receive(wait=True) == [Sent(7, None)]
        mine.shutdown(socket.SHUT_WR)
        assert list(received) == others[1:]
    sender.close()
