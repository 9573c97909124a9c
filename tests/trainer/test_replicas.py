"""Two real processes with unequal shares make one step: g = sum_r n_r gbar_r / sum_r n_r."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trainer_cases import first_moments, make_torch_trainer, make_units

from tailrace.trainer.trainer import TorchTrainer

NORMALIZE = ("sample_mean", "token_mean")
SHARES = ((0, 1, 2, 3), (4,))
"""Which units each rank processes in the first step; in the second, rank 1 has none."""


def train(rank: int, model_path: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=5),
    )
    for normalize in NORMALIZE:
        trainer = make(model_path, normalize)
        units = make_units(5)
        trainer.accumulate([units[i] for i in SHARES[rank]])
        first = trainer.step()
        trainer.save(folder / f"{normalize}{rank}")
        if rank == 0:
            trainer.accumulate(units)
        second = trainer.step()
        weights = torch.cat([tensor.flatten() for tensor in dict(trainer.weights()).values()])
        result = (first.num_tokens, first.loss, second.num_tokens, weights)
        torch.save(result, folder / f"{normalize}{rank}.pt")
    dist.destroy_process_group()


def make(model_path: Path, normalize: str) -> TorchTrainer:
    return make_torch_trainer(
        model_path, betas=(0.0, 0.9), max_grad_norm=1e9, normalize=normalize, max_tokens_per_microbatch=64
    )


def test_unequal_replicas_make_the_step_of_one(model_path: Path, tmp_path: Path) -> None:
    # This process is rank 0: one interpreter to start instead of two.
    context = torch.multiprocessing.get_context("spawn")
    other = context.Process(target=train, args=(1, model_path, tmp_path))
    other.start()
    train(0, model_path, tmp_path)
    other.join()
    assert other.exitcode == 0
    for normalize in NORMALIZE:
        alone = make(model_path, normalize)
        alone.accumulate(make_units(5))
        stats = alone.step()
        alone.save(tmp_path / "alone")
        wanted = first_moments(tmp_path / "alone")
        results = [torch.load(tmp_path / f"{normalize}{rank}.pt") for rank in (0, 1)]
        for rank, (num_tokens, loss, second_num_tokens, _) in enumerate(results):
            got = first_moments(tmp_path / f"{normalize}{rank}")
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)
            assert num_tokens == second_num_tokens == stats.num_tokens
            assert loss == pytest.approx(stats.loss, abs=1e-6)
        assert torch.equal(results[0][3], results[1][3]), "the replicas' weights stay the same to the bit"
