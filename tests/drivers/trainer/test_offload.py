"""A trainer that sleeps frees its state, refuses to train, and wakes with the same bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_cases import make_units

from tailrace.drivers.trainer.offload import Offloaded
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.errors import ScheduleError

Make = Callable[..., TorchTrainer]
UNITS = make_units(6)
DISK = dict.fromkeys(("weights", "gradients", "optimizer"), "disk")
CASES = {
    "all weights": {},
    "critic, old policy": {"advantage": "gae", "old_policy": "recomputed"},
    "adapter": {"lora": {"rank": 4}},
    "activation checkpointing": {"activation_checkpointing": True},
}


def held_bytes(trainer: TorchTrainer, part: str) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in trainer._tensors(part))


def trained(trainer: TorchTrainer, *, sleeps: bool) -> dict[str, Tensor]:
    """Three steps of two calls, the first of each during a rollout."""
    for step in range(3):
        for number, early in enumerate((True, False)):
            if sleeps:
                trainer.sleep()
                trainer.wake(early=early)
            trainer.accumulate([UNITS[2 * step + number]])
        if sleeps:
            trainer.sleep()
            trainer.wake()
        trainer.step()
    return {name: tensor.clone() for name, tensor in trainer.export_weights()}


@pytest.mark.parametrize("case", CASES)
def test_training_with_sleep_between_all_calls_gives_the_same_bits(make_trainer: Make, case: str) -> None:
    settings = {"learning_rate": 1e-3, "min_tokens_per_microbatch": 1, **CASES[case]}
    slept = trained(make_trainer(**settings, offload=DISK), sleeps=True)
    awake = trained(make_trainer(**settings), sleeps=False)
    assert slept.keys() == awake.keys()
    assert all(torch.equal(slept[name], awake[name]) for name in awake)


@pytest.mark.parametrize("part", DISK)
def test_a_part_that_stays_is_held_and_the_others_are_not(make_trainer: Make, part: str) -> None:
    trainer = make_trainer(offload=DISK | {part: "device"})
    trainer.accumulate(UNITS[:1])
    trainer.step()
    sizes = {name: held_bytes(trainer, name) for name in DISK}
    assert min(sizes.values()) > 10_000
    trainer.sleep()
    assert {name: held_bytes(trainer, name) for name in DISK} == dict.fromkeys(DISK, 0) | {part: sizes[part]}
    trainer.wake()
    assert {name: held_bytes(trainer, name) for name in DISK} == sizes


def test_training_during_the_rollout_loads_no_optimizer_state_and_no_gradients(make_trainer: Make) -> None:
    trainer = make_trainer(offload=DISK)
    trainer.accumulate(UNITS[:1])
    trainer.step()
    trainer.sleep()
    trainer.wake(early=True)
    assert held_bytes(trainer, "weights") > 0
    assert held_bytes(trainer, "optimizer") == held_bytes(trainer, "gradients") == 0
    trainer.accumulate(UNITS[1:2])
    with pytest.raises(ScheduleError, match=r"^step: .*away are: .*trainer\.offload\.optimizer; wake"):
        trainer.step()


def test_a_trainer_asleep_does_not_train_and_says_which_parts_are_away(make_trainer: Make) -> None:
    trainer = make_trainer(offload={"weights": "disk"})
    trainer.accumulate(UNITS[:1])
    trainer.sleep()
    asleep = r"asleep, because engines generate on its devices \(placement.kind\); away are: "
    for verb, call in {
        "step": trainer.step,
        "accumulate": lambda: trainer.accumulate(UNITS[:1]),
        "ess": lambda: trainer.ess(UNITS[:1]),
    }.items():
        with pytest.raises(ScheduleError, match=f"^{verb}: the trainer is {asleep}trainer.offload.weights"):
            call()
    trainer.wake()
    assert trainer.step().num_steps == 1


def test_a_trainer_asleep_publishes_and_saves_and_sleeps_on(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(offload=DISK, learning_rate=1e-3)
    trainer.accumulate(UNITS[:1])
    trainer.step()
    awake = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    trainer.sleep()
    with trainer.present("weights", "optimizer"):
        published = {name: tensor.clone() for name, tensor in trainer.export_weights()}
        trainer.save(tmp_path / "checkpoint")()
    assert all(torch.equal(published[name], awake[name]) for name in awake)
    assert held_bytes(trainer, "weights") == held_bytes(trainer, "optimizer") == 0
    trainer.wake()
    trainer.restore(tmp_path / "checkpoint")
    assert all(torch.equal(tensor, awake[name]) for name, tensor in trainer.weights())


def test_views_and_shared_storages_come_back_as_they_were() -> None:
    whole = torch.arange(100, dtype=torch.float32)
    half, strided = whole[50:], whole[::2]
    part = Offloaded("disk")
    part.leave([whole, half])
    assert part.is_away
    assert whole.untyped_storage().nbytes() == 0
    part.come_back()
    assert not part.is_away
    assert torch.equal(whole, torch.arange(100.0))
    assert torch.equal(half, torch.arange(50.0, 100.0))
    whole[0] = 7
    assert strided[0] == 7


def test_host_memory_of_a_cpu_is_where_it_is() -> None:
    part, tensor = Offloaded("host"), torch.ones(8)
    part.leave([tensor])
    assert not part.is_away
    assert tensor.sum() == 8
