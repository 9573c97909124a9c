"""Memory that a run needs, process by process, as an upper bound. Imports no torch.

Certain are the parts in memory.LEAST. The others are bounds of a pass over one micro-batch, and of the copies
of the weights that exist while a model is read, published or saved. benchmarks/memory.py measures both.
"""

from collections.abc import Iterator
from pathlib import Path

from tailrace.config import RunConfig
from tailrace.contracts.memory import MIB, STATE_BYTES, TRANSFORMERS_BYTES, ModelShape, ProcessMemory
from tailrace.contracts.trainer import CHUNK_ELEMENTS, FILE_BYTES, TrainerSettings
from tailrace.drivers.engine.settings import EngineSettings, NativeEngineSettings
from tailrace.drivers.reward.kinds import judge_kind
from tailrace.drivers.trainer.adapter import adapted_modules
from tailrace.model_folder import context_length
from tailrace.types import ITEM_BYTES

SMALL_PROCESS_BYTES, TORCH_BYTES, SERVER_BYTES = 150 * MIB, 400 * MIB, 3072 * MIB
"""A controller or reward worker, without what reward functions import; a process that has imported torch; the
processes of an inference server, without weights and KV cache."""
LOGIT_BYTES = 20
"""Bytes of a float32 logit: scaled, normalised, exponentiated and their gradients. To sample takes less."""


def run_memory(config: RunConfig, prompt_tokens: int) -> Iterator[ProcessMemory]:
    """Estimate the memory of all processes that a checked config starts on this machine, where the longest
    prompt has so many tokens."""
    assert config.model
    trainer, engine, host = config.trainer, config.engine, config.host
    shape, longest = ModelShape.read(config.model.path), longest_sample(config, prompt_tokens)
    modules = adapted_modules(config.model.path, trainer.lora) if trainer.lora else {}
    adapter = sum(map(sum, modules.values())) * (trainer.lora.rank if trainer.lora else 0)
    published = 4 * adapter if trainer.adapter else ITEM_BYTES[engine.dtype] * shape.num_parameters
    kept = config.weights.kept
    on_cpu, copies = trainer.device == "cpu", 4 * shape.num_parameters + published
    if host.starts("trainer"):
        yield trainer_memory(config, shape, longest, adapter, copies if on_cpu else 0)
    if host.starts("engine") if isinstance(engine, NativeEngineSettings) else not engine.urls:
        adapters = adapter * config.num_versions if trainer.adapter else 0
        yield engine_memory(shape, engine, longest, adapters, on_gpu=engines_on_gpu(config))
    if host.starts("trainer") and (kept or not on_cpu):
        parts = {"model": 0 if on_cpu else copies, "publications": kept * published}
        yield ProcessMemory("copies of the weights", "cpu", {}, parts, trainer.replicas)
    if config.algorithm.needs_reference and not trainer.lora and host.starts("reference"):
        parts = {"weights": 4 * shape.num_parameters, "logits": CHUNK_ELEMENTS * LOGIT_BYTES}
        yield ProcessMemory("reference", trainer.device, parts, {"process": TRANSFORMERS_BYTES})
    for judge in config.reward.judges:
        yield from judge_kind(judge).memory(judge)
    small = {"process": SMALL_PROCESS_BYTES}
    yield ProcessMemory("controller, reward workers", "cpu", {}, small, config.reward.workers + 1)


def longest_sample(config: RunConfig, prompt_tokens: int) -> int:
    """Tokens of the longest sample. Those of an environment fill the context."""
    assert config.model and config.sampling
    context = context_length(config.model.path)
    if config.environment.has_turns:
        return context
    sources = config.data.sources if config.data else ()
    limits = [source.max_prompt_tokens or context for source in sources] or [context]
    return min(context, min(prompt_tokens, max(limits)) + config.sampling.max_completion_tokens)


def trainer_memory(
    config: RunConfig, shape: ModelShape, longest: int, adapter: int = 0, copies: int = 0
) -> ProcessMemory:
    """Estimate the memory of one process of the trainer.

    Args:
        longest: tokens of the longest sample, which may exceed a micro-batch.
        adapter: parameters of the adapter, if one is trained.
        copies: bytes that it holds while it reads, publishes or saves the model.
    """
    settings, whole = config.trainer, shape.num_parameters
    ranks, on_cpu = settings.ranks, settings.device == "cpu"
    critic = whole if config.algorithm.advantage == "gae" else 0
    trained = (adapter if settings.lora else whole) + critic
    numbers = dict.fromkeys(STATE_BYTES, trained) | {"weights": whole + adapter + critic}
    state = {part: STATE_BYTES[part] * num // ranks for part, num in numbers.items()}
    work = {"micro-batch": pass_bytes(settings, shape, longest)}
    if config.algorithm.old_policy == "recomputed":
        work["old policy"] = 4 * (trained - critic) // ranks
    copies += state["optimizer"] * settings.async_checkpoints + 2 * min(FILE_BYTES, state["optimizer"])
    if on_cpu and not (config.run.checkpoint_every and settings.async_checkpoints):
        copies = max(0, copies - work["micro-batch"])  # they do not exist during a pass
    host = {"process": TRANSFORMERS_BYTES, "copies": copies}
    asleep = {part: state[part] for part in settings.kept_asleep()}
    if settings.cpu_offload and not on_cpu:
        host, asleep = host | state, {}
    else:
        work |= state
        if config.placement.kind != "disaggregated" and not on_cpu:
            places = settings.offload.places()
            host["asleep"] = sum(size for part, size in state.items() if places[part] == "host")
    return ProcessMemory("trainer", settings.device, work, host, ranks * settings.replicas, asleep)


def pass_bytes(settings: TrainerSettings, shape: ModelShape, longest: int) -> int:
    """An upper bound of what a forward and backward pass takes: activations, logits, and the weights that are
    gathered or cast to the type of the computation, with their gradients.

    A block keeps float32 for its norms, those of the heads included, and the input of each linear layer.
    """
    size, tokens = ITEM_BYTES[settings.dtype], max(settings.max_tokens_per_microbatch, longest)
    numbers = 5 * shape.hidden_size + 6 * (shape.query_size + shape.kv_size) + 4 * shape.mlp_size
    block, residual = 16 * shape.hidden_size + size * numbers, 4 * shape.hidden_size
    kept = (
        block + shape.num_layers * residual if settings.activation_checkpointing else block * shape.num_layers
    )
    logits = LOGIT_BYTES * min(tokens * shape.vocabulary, CHUNK_ELEMENTS)
    weights = 4 * shape.outside_parameters + (size * shape.num_parameters if size < 4 else 0)
    if settings.ranks > 1 or settings.cpu_offload:
        weights = (2 * size + 8) * (shape.outside_parameters + shape.block_parameters)
    return tokens * kept + logits + weights


def engine_memory(
    shape: ModelShape, settings: EngineSettings, longest: int, adapters: int = 0, *, on_gpu: bool
) -> ProcessMemory:
    """Estimate the memory of one engine.

    Args:
        longest: tokens of a prompt and its completion, at most.
        adapters: parameters of all LoRA adapters that the engine keeps.
        on_gpu: it computes on CUDA devices; otherwise on the CPU.
    """
    size, seqs = ITEM_BYTES[settings.dtype], settings.max_num_seqs
    token, weights = shape.kv_bytes(size), size * shape.num_parameters
    if not isinstance(settings, NativeEngineSettings):  # it takes the KV cache that its device has room for
        split = settings.tensor_parallel_size
        parts = {"weights": weights // split, "one sequence": token * longest}
        host = {"process": SERVER_BYTES * split}
        return ProcessMemory("engine", "cuda" if on_gpu else "cpu", parts, host, settings.num_engines)
    # A prefill keeps the keys and values of all layers, and once more while those of the layers are joined.
    position = 2 * token + size * (4 * shape.hidden_size + 3 * shape.mlp_size)
    prefill = position * min(settings.max_prefill_tokens, seqs * longest)
    parts = {
        "weights": weights + size * adapters,
        "one sequence": token * longest,
        "KV cache": token * max(0, min(settings.kv_cache_tokens, seqs * longest) - longest),
        "computation": max(prefill, seqs * shape.vocabulary * LOGIT_BYTES),
    }
    # In host memory are new weights, or on a CPU the copy for oneDNN (Matrix of native/model.py).
    host = {"process": TORCH_BYTES, "copy of the weights": weights}
    return ProcessMemory("engine", settings.device, parts, host, settings.num_engines)


def engines_on_gpu(config: RunConfig) -> bool:
    """Whether the engines compute on a GPU. An inference server does where this machine has one."""
    if isinstance(config.engine, NativeEngineSettings):
        return config.engine.device != "cpu"
    return Path("/proc/driver/nvidia/version").exists()
