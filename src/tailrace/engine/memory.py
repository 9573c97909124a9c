"""The memory that one rollout engine needs, from the shape of the model. Imports no torch."""

from tailrace.engine.settings import EngineSettings, NativeEngineSettings
from tailrace.memory import ITEM_BYTES, ModelShape, ProcessMemory, largest_phase

PROCESS_BYTES = 400 * 2**20
"""A process that has imported torch."""
SERVER_BYTES = 3 * 2**30
"""The processes of an inference server, without weights and KV cache."""
LOGIT_BYTES = 16
"""Of one logit: in float32, scaled, normalised, and the noise."""


def engine_memory(
    shape: ModelShape,
    settings: EngineSettings,
    *,
    context: int,
    adapted_parameters: int = 0,
    has_cuda: bool = True,
) -> ProcessMemory:
    """Estimate the memory of one engine.

    Args:
        context: tokens of a prompt and its completion, at most.
        adapted_parameters: weights of which the engine keeps a copy without their LoRA adapter.
        has_cuda: an inference server computes on CUDA devices; otherwise on the CPU.
    """
    size = ITEM_BYTES[settings.dtype]
    token = kv_bytes_per_token(shape, size)
    weights = {"weights": size * shape.num_parameters, "base of the adapter": size * adapted_parameters}
    if not isinstance(settings, NativeEngineSettings):
        # A server takes the KV cache that its device has room for. One sequence must fit.
        tensor_parallel = settings.tensor_parallel_size
        parts = {"weights": weights["weights"] // tensor_parallel, "KV cache": context * token}
        process = {"process": SERVER_BYTES * tensor_parallel}
        device, host = ("cuda", process) if has_cuda else ("cpu", {})
        on_device = parts if has_cuda else process | parts
        return ProcessMemory("engine", device, on_device, host, settings.num_engines)
    kv = token * min(settings.kv_cache_tokens, settings.max_num_seqs * context)
    # The keys and values of all layers, and once more while those of the layers are joined.
    position = 2 * token + size * (4 * shape.hidden_size + 3 * shape.mlp_size)
    prefill = position * min(settings.max_prefill_tokens, settings.max_num_seqs * context)
    decode = settings.max_num_seqs * shape.vocabulary * LOGIT_BYTES
    loading = {"new weights": shape.stored_bytes}
    host = {"process": PROCESS_BYTES}
    computing = {"KV cache": kv, "computation": max(prefill, decode)}
    num = settings.num_engines
    if settings.device == "cpu":
        phases = {"load": host | weights | loading, "generate": host | weights | computing}
        return ProcessMemory("engine", "cpu", largest_phase(phases), {}, num)
    on_device = largest_phase({"generate": weights | computing})
    return ProcessMemory("engine", settings.device, on_device, host | loading, num)


def kv_bytes_per_token(shape: ModelShape, size: int) -> int:
    """Keys and values of one position in all layers.

    Args:
        size: bytes of a number of the cache.
    """
    return 2 * shape.num_layers * shape.kv_size * size
