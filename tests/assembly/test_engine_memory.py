"""The estimate of an engine's memory."""

from tailrace.assembly.memory import engine_memory, kv_bytes_per_token
from tailrace.engine.settings import NativeEngineSettings, VllmEngineSettings
from tailrace.memory import ModelShape

SHAPE = ModelShape(
    num_parameters=1000,
    block_parameters=400,
    outside_parameters=200,
    tensor_parameters=200,
    num_layers=2,
    hidden_size=8,
    query_size=8,
    kv_size=4,
    mlp_size=16,
    vocabulary=20,
    stored_bytes=2000,
)


def test_the_kv_cache_is_bounded_by_its_size_and_by_what_requests_can_fill() -> None:
    assert kv_bytes_per_token(SHAPE, 2) == 2 * 2 * 4 * 2
    settings = NativeEngineSettings(kv_cache_tokens=100_000_000, max_num_seqs=1000)
    tight = NativeEngineSettings(kv_cache_tokens=5_000_000, max_num_seqs=1000)
    assert engine_memory(SHAPE, settings, context=64_000).on_device["KV cache"] == 64_000_000 * 64
    assert engine_memory(SHAPE, tight, context=64_000).on_device["KV cache"] == 5_000_000 * 64


def test_an_engine_that_gets_adapters_keeps_them_beside_its_weights() -> None:
    plain = engine_memory(SHAPE, NativeEngineSettings(device="cuda"), context=100)
    adapted = engine_memory(SHAPE, NativeEngineSettings(device="cuda"), context=100, adapter_parameters=300)
    assert adapted.device_bytes - plain.device_bytes == 4 * 300


def test_a_server_needs_room_for_weights_and_one_sequence_on_each_device() -> None:
    settings = VllmEngineSettings(replicas=3, tensor_parallel_size=2, dtype="bfloat16")
    need = engine_memory(SHAPE, settings, context=100)
    assert need.on_device == {"weights": 1000, "KV cache": 100 * 32}
    assert (need.device, need.num) == ("cuda", 3)
    assert engine_memory(SHAPE, settings, context=100, has_cuda=False).device == "cpu"
