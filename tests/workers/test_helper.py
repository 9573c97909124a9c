"""A helper process beside a trainer: the same step, computed in two places."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from worker_cases import is_running

from tailrace.algo.base import AlgorithmSettings
from tailrace.engine.base import SamplingSettings
from tailrace.trainer.base import StepStats, TrainerSettings
from tailrace.trainer.torch_trainer import TorchTrainer
from tailrace.trainer.wire import TrainingSample
from tailrace.types import SampleId
from tailrace.workers.helper import LocalHelper, helpers_of, make_helped, passes_of
from tailrace.workers.messages import TrainerJob


def job_of(model: Path, helpers: int) -> TrainerJob:
    return TrainerJob(
        model=model,
        trainer=TrainerSettings(learning_rate=1e-6, betas=(0.0, 0.9), max_grad_norm=1e9, least_tokens=100),
        algorithm=AlgorithmSettings(),
        sampling=SamplingSettings(max_completion_tokens=60),
        helpers=helpers,
    )


@contextmanager
def trainer_of(model: Path, folder: Path, helpers: int) -> Iterator[tuple[TorchTrainer, list[LocalHelper]]]:
    job = job_of(model, helpers)
    folder.mkdir()
    with helpers_of(job, folder) as spawned:
        trainer = TorchTrainer(passes_of(job))
        make_helped(trainer, spawned, folder)
        yield trainer, spawned


def units(number: int) -> list[list[TrainingSample]]:
    """Of twelve prompts; every fifth sample has no advantage."""
    return [
        [
            TrainingSample(
                SampleId(prompt, number, index),
                [2 + prompt, 3, 4],
                [2 + (prompt * token + index) % 29 for token in range(5 + 4 * index)],
                [-3.0] * (5 + 4 * index),
                0.0 if (prompt + index) % 5 == 0 else 0.5 - index / 4,
            )
            for index in range(4)
        ]
        for prompt in range(12)
    ]


def two_steps(trainer: TorchTrainer, helpers: int) -> list[StepStats]:
    stats = []
    for number in range(2):
        trainer.accumulate(units(number), num_helpers=helpers)
        stats.append(trainer.step(num_helpers=helpers))
    return stats


def gradient_of(trainer: TorchTrainer, folder: Path) -> torch.Tensor:
    """That the last step used, there being no momentum."""
    trainer.save(folder)
    tensors = load_file(folder / "trainer.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors) if name.startswith("first.")])


def test_a_step_with_helpers_is_the_same_but_for_rounding(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    begin, given = LocalHelper.begin, []
    monkeypatch.setattr(LocalHelper, "begin", lambda self, part: (given.append(len(part)), begin(self, part)))
    with trainer_of(model_path, tmp_path / "a", 0) as (trainer, _):
        wanted, alone = two_steps(trainer, 0), gradient_of(trainer, tmp_path / "alone")
    with trainer_of(model_path, tmp_path / "b", 2) as (trainer, helpers):
        found, helped = two_steps(trainer, 2), gradient_of(trainer, tmp_path / "helped")
        assert not any(helper.gradient.any() for helper in helpers)
    assert len(given) == 2 * 2 and min(given) > 5
    assert alone.abs().max() > 1e-3
    torch.testing.assert_close(helped, alone, atol=1e-6, rtol=0)
    for one, other in zip(wanted, found, strict=True):
        assert (other.samples, other.num_tokens) == (one.samples, one.num_tokens)
        for name in ("loss", "grad_norm", "entropy", "kl", "ess"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), abs=1e-6)


def test_what_comes_while_a_helper_may_take_part_is_computed_at_once_in_parts_of_like_cost(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    begin, given = LocalHelper.begin, []
    monkeypatch.setattr(LocalHelper, "begin", lambda self, part: (given.append(part), begin(self, part)))
    with trainer_of(model_path, tmp_path / "a", 1) as (trainer, _):
        cost = passes_of(job_of(model_path, 0)).cost
        first, *others = units(0)
        trainer.accumulate([first[:1]])  # too little for a pass: waits
        assert not given
        trainer.accumulate([first[1:], *others], num_helpers=1)
        [part] = given
        everything = [sample for unit in units(0) for sample in unit]
        rest = sum(map(cost, everything)) - sum(map(cost, part))
        assert abs(sum(map(cost, part)) - rest) <= max(map(cost, everything))
        assert trainer.step(num_helpers=1).num_tokens == sum(len(s.completion_ids) for s in everything)
        assert len(given) == 1


def test_what_helpers_computed_before_a_restore_is_forgotten(model_path: Path, tmp_path: Path) -> None:
    with trainer_of(model_path, tmp_path / "a", 1) as (trainer, _):
        trainer.save(tmp_path / "saved")
        wanted, first = two_steps(trainer, 1), gradient_of(trainer, tmp_path / "first")
        trainer.accumulate(units(3), num_helpers=1)
        trainer.restore(tmp_path / "saved")
        assert two_steps(trainer, 1)[-1].samples == wanted[-1].samples
        torch.testing.assert_close(gradient_of(trainer, tmp_path / "again"), first, atol=1e-6, rtol=0)


def test_the_end_of_a_helper_ends_the_step_with_its_cause(model_path: Path, tmp_path: Path) -> None:
    with trainer_of(model_path, tmp_path / "a", 1) as (trainer, [helper]):
        os.kill(helper.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="a helper of the trainer ended: signal SIGKILL"):
            two_steps(trainer, 1)


def test_a_helper_ends_with_its_trainer(model_path: Path, tmp_path: Path) -> None:
    with trainer_of(model_path, tmp_path / "a", 1) as (_, [helper]):
        assert is_running(helper.pid)
    assert not is_running(helper.pid)
