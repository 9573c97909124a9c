"""The order in which a process of the trainer executes what it is told."""

import torch

from helpers.wire import connected
from tailrace.contracts.trainer import TrainerSettings
from tailrace.contracts.weights import new_link
from tailrace.drivers.weights.process_group import ProcessGroupSender
from tailrace.drivers.weights.settings import ProcessGroupSettings
from tailrace.drivers.weights.transports import WeightReceiver
from tailrace.drivers.workers.trainer import TrainerJob, TrainerWorker


def test_weights_are_sent_while_the_trainer_executes_an_earlier_call() -> None:
    sender = ProcessGroupSender(ProcessGroupSettings(message_timeout_s=30))
    weights, link = sender.store(tensors := {"a": torch.arange(12.0)}, 1), new_link("engine-0")
    with connected(TrainerWorker) as (controller, connection):
        worker = TrainerWorker(TrainerJob.model_construct(trainer=TrainerSettings()), connection, sender)
        for method, *arguments in (
            (TrainerWorker.accumulate, []),
            (TrainerWorker.step,),
            (TrainerWorker.send, 1, link),
            (TrainerWorker.publish, 2),
        ):
            controller.call(method, *arguments)
        assert next(worker._received).method == "accumulate"
        assert torch.equal(WeightReceiver().receive(weights, link)["a"], tensors["a"])
        assert controller.heard() == [None]
        controller.finish()
        assert [call.method for call in worker._received] == ["step", "publish"]
    sender.close()
