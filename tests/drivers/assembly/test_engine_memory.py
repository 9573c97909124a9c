"""The estimate of an engine's memory."""

from pathlib import Path

import pytest

from tailrace.config import config_of
from tailrace.contracts.memory import ModelShape
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.kinds.native import engine_memory
from tailrace.extras.http.kind import server_memory
from tailrace.extras.http.settings import VllmEngineSettings

SHAPE = ModelShape(
    num_parameters=1000,
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_size=4,
    mlp_size=16,
    vocabulary=20,
    context_tokens=100_000,
)


def test_the_kv_cache_is_bounded_by_its_size_and_by_what_requests_can_fill() -> None:
    settings = NativeEngineSettings(kv_cache_tokens=100_000_000, max_num_seqs=1000)
    tight = NativeEngineSettings(kv_cache_tokens=5_000_000, max_num_seqs=1000)
    for each, tokens in ((settings, 64_000_000), (tight, 5_000_000)):
        held = engine_memory(SHAPE, each, 64_000).on_device
        assert held["one sequence"] == 64_000 * SHAPE.kv_bytes(4)
        assert held["one sequence"] + held["KV cache"] == tokens * 64


def test_the_inputs_of_a_step_and_on_a_gpu_the_results_of_a_captured_step_take_memory() -> None:
    shape = {"max_num_seqs": 1000, "max_prefill_tokens": 1}
    cpu, gpu = (
        engine_memory(SHAPE, NativeEngineSettings(device=device, **shape), 100).on_device["computation"]
        for device in ("cpu", "cuda")
    )
    assert cpu == 1000 * 20 * 20 + 5 * 8 * 1001
    copied = 2 * 2**15 * SHAPE.kv_bytes(4) // 2
    assert gpu - cpu == 512 * (4 * (4 * 8 + 3 * 16) + 20 * 20) + copied


def test_an_engine_that_gets_adapters_keeps_them_beside_its_weights() -> None:
    settings = NativeEngineSettings(device="cuda")
    plain, adapted = (engine_memory(SHAPE, settings, 100, each) for each in (0, 300))
    assert adapted.device_bytes - plain.device_bytes == 4 * 300


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_server_needs_room_for_weights_and_one_sequence_on_each_device(device: str) -> None:
    settings = VllmEngineSettings(replicas=3, tensor_parallel_size=2, dtype="bfloat16")
    need = server_memory(SHAPE, settings, 100, device)
    assert need.on_device == {"weights": 1000, "one sequence": 100 * 32}
    assert (need.device, need.num) == (device, 3)


def test_servers_with_a_list_of_gpus_are_on_them_whatever_this_machine_has() -> None:
    tree = {"run": {"rounds": 1, "group_size": 2}, "schedule": {"name": "serial"}, "engine": {"kind": "vllm"}}
    listed = {"placement": {"devices": "gpus", "engines": [[0]]}}
    assert config_of({**tree, **listed}).engines_on_gpu
    assert config_of(tree).engines_on_gpu == Path("/proc/driver/nvidia/version").exists()
    assert not config_of({**tree, **listed, "engine": {"device": "cpu"}}).engines_on_gpu
