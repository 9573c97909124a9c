"""The bound of a trainer's memory, from the shape of a model."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from helpers.tiny_models import save_tiny_model
from tailrace.config import RunConfig
from tailrace.contracts.memory import ModelShape, ProcessMemory, gib
from tailrace.contracts.trainer import FILE_BYTES, LoraSettings, TrainerSettings
from tailrace.controller.base import RunSettings
from tailrace.drivers.kinds.torch import pass_bytes, trainer_memory
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.distributed import DTYPES
from tailrace.drivers.trainer.model import PolicyModel, hidden_states
from tailrace.types import SampleId

QWEN3 = ModelShape(
    num_parameters=596_049_920,
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    mlp_size=3072,
    vocabulary=151_936,
    context_tokens=40_960,
    block_parameters=15_730_944,
    outside_parameters=155_583_488,
)
"""Qwen3-0.6B."""
GB = 10**9


def estimate(settings: TrainerSettings, *, checkpoint_every: int = 0, **given: Any) -> ProcessMemory:
    """The memory of one process of a trainer with these settings, for Qwen3-0.6B."""
    run = RunSettings(rounds=1, group_size=2, checkpoint_every=checkpoint_every)
    config = RunConfig(run=run, schedule={"name": "serial"}, trainer=settings)
    return trainer_memory(config, QWEN3, **{"longest": 0} | given)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_weights_gradients_and_moments_are_divided_among_the_ranks(ranks: int) -> None:
    held = estimate(TrainerSettings(ranks=ranks, replicas=2))
    assert held.on_device["weights"] == held.on_device["gradients"] == 4 * QWEN3.num_parameters // ranks
    assert held.on_device["optimizer"] == 8 * QWEN3.num_parameters // ranks
    assert held.num == 2 * ranks


def test_processes_that_divide_layers_have_a_part_of_the_state_and_of_the_activations() -> None:
    half = estimate(TrainerSettings(tensor_parallel=2, replicas=2))
    assert half.on_device["optimizer"] == 8 * QWEN3.num_parameters // 2 and half.num == 4
    whole, divided = (pass_bytes(TrainerSettings(tensor_parallel=n), QWEN3, 0) for n in (1, 2))
    of_hidden = 16_384 * QWEN3.num_layers * (16 + 4 * 5) * QWEN3.hidden_size  # each process has it whole
    assert whole - divided == pytest.approx((whole - of_hidden) / 2, rel=0.02)


def test_activation_checkpointing_keeps_the_inputs_of_the_blocks_only() -> None:
    few = TrainerSettings(activation_checkpointing=True, max_tokens_per_microbatch=4096, dtype="bfloat16")
    all = few.model_copy(update={"activation_checkpointing": False})
    saved = pass_bytes(all, QWEN3, 0) - pass_bytes(few, QWEN3, 0)
    assert 8 * GB < saved < 12 * GB


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_activations_that_autograd_keeps_are_within_the_bound_and_near_it(
    tmp_path: Path, family: str, dtype: Literal["float32", "bfloat16"]
) -> None:
    folders = [tmp_path / "2", tmp_path / "4"]
    for folder in folders:
        save_tiny_model(folder, family, num_hidden_layers=int(folder.name), head_dim=16, hidden_size=128)
    two, four = (_bytes_of_a_token(folder, dtype) for folder in folders)

    def bound(folder: Path) -> int:
        sizes = (TrainerSettings(dtype=dtype, max_tokens_per_microbatch=each) for each in (2, 1))
        two_tokens, one = (pass_bytes(each, ModelShape.read(folder), 0) for each in sizes)
        return two_tokens - one

    of_a_block = (bound(folders[1]) - bound(folders[0])) / 2
    assert 0.6 * of_a_block < (four - two) / 2 <= of_a_block


def _bytes_of_a_token(folder: Path, dtype: Literal["float32", "bfloat16"]) -> float:
    """The bytes that the forward pass of one more token keeps for the backward pass."""
    policy = PolicyModel.load(folder, TrainerSettings(dtype=dtype), temperature=1.0)
    ids = [1 + i % 50 for i in range(65)]
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    sizes = []
    for num in (2, 4):
        kept.clear()
        samples = [
            TrainingSample(SampleId(0, 0, 0), [prompt], ids[1:], [0.0] * 64, 1.0) for prompt in range(num)
        ]
        [batch] = policy.micro_batches(samples)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden_states(policy.model.base_model, batch, DTYPES[dtype])
        sizes.append(sum(each.untyped_storage().nbytes() for each in kept.values()))
    return (sizes[1] - sizes[0]) / 128


def test_a_sample_longer_than_a_micro_batch_counts() -> None:
    settings = TrainerSettings(max_tokens_per_microbatch=4096)
    wider = settings.model_copy(update={"max_tokens_per_microbatch": 9000})
    for longest, same in ((9000, wider), (4000, settings)):
        assert pass_bytes(settings, QWEN3, longest) == pass_bytes(same, QWEN3, 0)


def test_lora_needs_no_gradient_and_moments_for_the_weights() -> None:
    settings = TrainerSettings(lora=LoraSettings(), activation_checkpointing=True)
    held = estimate(settings, adapter=10_000_000).on_device
    assert (held["gradients"], held["optimizer"]) == (40_000_000, 80_000_000)
    assert held["weights"] == 4 * QWEN3.num_parameters + 40_000_000


def test_on_a_gpu_the_host_saves_and_the_device_computes() -> None:
    settings = TrainerSettings(device="cuda", dtype="bfloat16", async_checkpoints=False)
    need = estimate(settings)
    assert need.device == "cuda"
    assert need.on_device.keys() == {"weights", "gradients", "optimizer", "micro-batch"}
    assert need.host_parts["copies"] == 2 * FILE_BYTES
    moved = estimate(settings.model_copy(update={"cpu_offload": True}))
    assert moved.on_device.keys() == {"micro-batch"} and "optimizer" in moved.host_parts


def test_a_checkpoint_beside_training_needs_a_copy_in_host_memory() -> None:
    settings = TrainerSettings(max_tokens_per_microbatch=4096)
    beside, after = (estimate(settings, checkpoint_every=each, copies=GB).host_parts for each in (1, 0))
    assert beside["copies"] == GB + 8 * QWEN3.num_parameters + 2 * FILE_BYTES
    assert after["copies"] == 0, "a micro-batch takes more at another time"


def test_sizes_are_written_in_a_unit_that_reads_well() -> None:
    assert (gib(3 * 2**30), gib(5 * 2**20)) == ("3.0 GiB", "5 MiB")
