"""The estimate of a trainer's memory, from the shape of a model."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from helpers.tiny_models import save_tiny_model
from tailrace.assembly import memory
from tailrace.assembly.memory import block_activation_bytes, trainer_memory
from tailrace.config import RunConfig
from tailrace.controller.base import RunSettings
from tailrace.memory import ITEM_BYTES, ModelShape, ProcessMemory, gib, largest_phase
from tailrace.trainer import checkpoint
from tailrace.trainer.base import LoraSettings, TrainerSettings
from tailrace.trainer.batch import TrainingSample
from tailrace.trainer.distributed import DTYPES
from tailrace.trainer.model import CHUNK_ELEMENTS, PolicyModel, hidden_states
from tailrace.types import SampleId

QWEN3 = ModelShape(
    num_parameters=596_049_920,
    block_parameters=15_730_944,
    outside_parameters=155_583_488,
    tensor_parameters=155_582_464,
    num_layers=28,
    hidden_size=1024,
    query_size=2048,
    kv_size=1024,
    mlp_size=3072,
    vocabulary=151_936,
    stored_bytes=1_192_099_840,
    head_norms=True,
)
"""Qwen3-0.6B."""
GB = 10**9


def estimate(
    settings: TrainerSettings,
    *,
    checkpoint_every: int = 0,
    adapter: int = 0,
    longest: int = 0,
    is_first: bool = True,
) -> ProcessMemory:
    """Of one process of a trainer with these settings, for Qwen3-0.6B."""
    run = RunSettings(rounds=1, group_size=2, checkpoint_every=checkpoint_every)
    config = RunConfig(run=run, schedule={"name": "serial"}, trainer=settings)
    return trainer_memory(config, QWEN3, adapter=adapter, longest=longest, is_first=is_first)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_weights_gradients_and_moments_are_divided_among_the_ranks(ranks: int) -> None:
    settings = TrainerSettings(ranks=ranks, activation_checkpointing=True, max_tokens_per_microbatch=16_384)
    parts = estimate(settings, is_first=False).on_device
    assert parts["weights"] == parts["gradient"] == 4 * QWEN3.num_parameters // ranks
    assert parts["optimizer"] == 8 * QWEN3.num_parameters // ranks


def test_activation_checkpointing_keeps_the_inputs_of_the_blocks_only() -> None:
    few = TrainerSettings(
        device="cuda", activation_checkpointing=True, max_tokens_per_microbatch=4096, dtype="bfloat16"
    )
    all = few.model_copy(update={"activation_checkpointing": False})
    kept, whole = (estimate(settings).on_device["activations"] for settings in (few, all))
    inputs = 4096 * 1024 * 4 * 28
    assert inputs <= kept < 2 * inputs
    assert whole == 4096 * 28 * block_activation_bytes(QWEN3, 2)
    assert whole > 8 * GB


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_activations_of_a_block_are_what_autograd_keeps(
    tmp_path: Path, family: str, dtype: Literal["float32", "bfloat16"]
) -> None:
    folders = [tmp_path / "2", tmp_path / "4"]
    for folder in folders:
        save_tiny_model(folder, family, num_hidden_layers=int(folder.name), head_dim=16)
    two, four = (_bytes_of_a_token(folder, dtype) for folder in folders)
    shape = ModelShape.read(folders[0])
    assert shape.head_norms == (family == "qwen3")
    heads = shape.query_size // 16 + shape.head_norms * (shape.query_size + shape.kv_size) // 16
    scales = 4 * (2 + heads)  # of norms, and the log-sum-exp of each head
    assert (four - two) / 2 == block_activation_bytes(shape, ITEM_BYTES[dtype]) + scales


def _bytes_of_a_token(folder: Path, dtype: Literal["float32", "bfloat16"]) -> float:
    """What the forward pass of one more token keeps for the backward pass."""
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
        [batch] = policy.micro_batches(samples, 64 * num)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden_states(policy.model.base_model, batch, DTYPES[dtype])
        sizes.append(sum(each.untyped_storage().nbytes() for each in kept.values()))
    return (sizes[1] - sizes[0]) / 128


def test_a_sample_longer_than_a_micro_batch_counts() -> None:
    settings = TrainerSettings(device="cuda", activation_checkpointing=True, max_tokens_per_microbatch=4096)
    wider = settings.model_copy(update={"max_tokens_per_microbatch": 9000})
    for longest, same in ((9000, wider), (4000, settings)):
        found = estimate(settings, is_first=True, longest=longest)
        assert found == estimate(same)


def test_lora_needs_no_gradient_and_moments_for_the_weights() -> None:
    settings = TrainerSettings(lora=LoraSettings(), activation_checkpointing=True)
    lora = estimate(settings, adapter=10_000_000)
    full = estimate(settings.model_copy(update={"lora": None}))
    assert lora.on_device["gradient"] == 40_000_000
    assert lora.host_bytes < 0.6 * full.host_bytes


def test_on_a_gpu_the_host_reads_and_saves_and_the_device_computes() -> None:
    settings = TrainerSettings(
        device="cuda", ranks=2, dtype="bfloat16", activation_checkpointing=True, async_checkpoints=False
    )
    need = estimate(settings)
    assert need.device == "cuda"
    assert {"weights", "gradient", "optimizer", "activations", "CUDA"} <= need.on_device.keys()
    assert "whole model" in need.in_host and "weights" in need.in_host
    assert need.host_bytes == sum(need.in_host.values())
    offloaded = settings.model_copy(update={"cpu_offload": True})
    moved = estimate(offloaded)
    assert "optimizer" not in moved.on_device and "optimizer" in moved.in_host


def test_a_checkpoint_beside_training_needs_a_copy_in_host_memory() -> None:
    settings = TrainerSettings(device="cuda", ranks=2)
    first, other = (
        estimate(settings, checkpoint_every=1, is_first=is_first).in_host["checkpoint copy"]
        for is_first in (True, False)
    )
    moments, files = 4 * QWEN3.num_parameters, 2 * memory.FILE_BYTES
    assert (first, other) == (moments + files + 4 * QWEN3.num_parameters, moments + files)
    at_the_end = estimate(TrainerSettings())
    assert "checkpoint copy" not in at_the_end.on_device


def test_the_processes_of_a_trainer_are_counted_once() -> None:
    settings = TrainerSettings(ranks=4, replicas=2)
    first, others = (estimate(settings, is_first=is_first) for is_first in (1, 0))
    assert (first.num, others.num) == (2, 6)
    alone = estimate(TrainerSettings(), is_first=False)
    assert alone.num == 0


def test_the_constants_are_those_of_the_trainer() -> None:
    assert (memory.LOGITS_AT_ONCE, memory.FILE_BYTES) == (CHUNK_ELEMENTS, checkpoint.FILE_BYTES)


def test_the_largest_phase_is_what_counts() -> None:
    assert largest_phase({"a": {"x": 3, "y": 0}, "b": {"x": 2}}) == {"x": 3}
    assert (gib(3 * 2**30), gib(5 * 2**20)) == ("3.0 GiB", "5 MiB")
