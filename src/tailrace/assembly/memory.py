"""What memory a run needs, process by process, and what this machine has. Imports no torch.

A rank of the trainer has phases, one of which is the largest: reading the folder, a pass over a micro-batch
of `max_tokens_per_microbatch` tokens, publishing, and saving a checkpoint. The copy from which a checkpoint
is written is there in all of them but the first, if training goes on beside it. benchmarks/memory.py
measures it.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tailrace.config import RunConfig
from tailrace.data.base import sources_of
from tailrace.engine.settings import EngineSettings, NativeEngineSettings
from tailrace.environments.settings import EpisodeSettings
from tailrace.memory import (
    ITEM_BYTES,
    STATE_BYTES,
    TRANSFORMERS_BYTES,
    ModelShape,
    ProcessMemory,
    in_turn,
    largest_phase,
)
from tailrace.model_folder import context_length
from tailrace.reward.judge_memory import judge_memory
from tailrace.reward.judge_settings import LocalJudgeSettings
from tailrace.trainer.adapter import adapted_modules
from tailrace.trainer.base import TrainerSettings
from tailrace.weights.base import KEPT_VERSIONS, ProcessGroupSettings, SharedMemorySettings

SMALL_PROCESS_BYTES = 150 * 2**20
"""The controller, and each reward worker, without what reward functions import."""
TORCH_BYTES = 400 * 2**20
"""A process that has imported torch."""
SERVER_BYTES = 3 * 2**30
"""The processes of an inference server, without weights and KV cache."""
CUDA_BYTES = 600 * 2**20
"""CUDA's context and the workspaces of its libraries."""
LOGITS_AT_ONCE = 1 << 26
"""As logprobs.CHUNK_ELEMENTS."""
FILE_BYTES = 2**28
"""As state_files.FILE_BYTES. torch holds a file of a checkpoint twice while it is written."""
TRAINED_LOGIT_BYTES, SAMPLED_LOGIT_BYTES = 20, 16
"""Of one logit in float32: scaled, normalised, exponentiated and their gradients; scaled, normalised and the
noise."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def run_memory(config: RunConfig, prompt_tokens: int) -> Iterator[ProcessMemory]:
    """Estimate the memory of all processes that a checked config starts on this machine, where the longest
    prompt has so many tokens."""
    assert config.model
    path, trainer, engine = config.model.path, config.trainer, config.engine
    shape = ModelShape.read(path)
    longest = longest_sample(config, prompt_tokens)
    modules = adapted_modules(path, trainer.lora) if trainer.lora else {}
    rank = trainer.lora.rank if trainer.lora else 0
    adapter = sum(rank * (outputs + inputs) for outputs, inputs in modules.values())
    if config.host.starts("trainer"):
        for is_first in (True, False):
            process = trainer_memory(config, shape, adapter=adapter, longest=longest, is_first=is_first)
            if process.num:
                yield process
    if config.host.starts("engine") if isinstance(engine, NativeEngineSettings) else not engine.urls:
        kept = adapter * config.num_versions if trainer.adapter else 0
        has_cuda = engines_on_gpu(config)
        yield engine_memory(shape, engine, context=longest, adapter_parameters=kept, has_cuda=has_cuda)
    if config.algorithm.needs_reference and not trainer.lora and config.host.starts("reference"):
        yield _reference_memory(shape, trainer)
    if isinstance(config.weights, SharedMemorySettings):
        versions = (KEPT_VERSIONS + 1) * _published_bytes(config, shape, adapter)
        yield ProcessMemory("weights in /dev/shm", "cpu", {"versions": versions}, {})
    for judge in config.reward.judges:
        if isinstance(judge, LocalJudgeSettings):
            yield judge_memory(judge)
    small = {"process": SMALL_PROCESS_BYTES}
    yield ProcessMemory("controller, reward workers", "cpu", small, {}, config.reward.workers + 1)


def longest_sample(config: RunConfig, prompt_tokens: int) -> int:
    """Tokens of the longest sample. Those of an environment fill the context."""
    assert config.model and config.sampling
    context = context_length(config.model.path)
    if isinstance(config.environment, EpisodeSettings):
        return context
    sources = sources_of(config.data) if config.data else ()
    limits = [source.max_prompt_tokens or context for source in sources] or [context]
    return min(context, min(prompt_tokens, max(limits)) + config.sampling.max_completion_tokens)


def trainer_memory(
    config: RunConfig, shape: ModelShape, *, adapter: int = 0, longest: int = 0, is_first: bool = True
) -> ProcessMemory:
    """Estimate the memory of one process of the trainer.

    Args:
        adapter: parameters of the adapter, if one is trained.
        longest: tokens of the longest sample, which may exceed a micro-batch.
        is_first: rank 0, which alone reads the folder, publishes and exports.
    """
    settings, algorithm = config.trainer, config.algorithm
    ranks, on_cpu, has_critic = settings.ranks, settings.device == "cpu", algorithm.advantage == "gae"
    is_sharded = ranks > 1 or settings.cpu_offload
    saves_beside = settings.async_checkpoints and config.run.checkpoint_every > 0
    published = _published_bytes(config, shape, adapter) if is_first else 0
    kept_versions = KEPT_VERSIONS if isinstance(config.weights, ProcessGroupSettings) else 0
    trained = adapter if settings.lora else shape.num_parameters
    whole, of_adapter = 4 * shape.num_parameters, 4 * trained if settings.lora else 0
    kept = {
        "weights": (whole + of_adapter) // ranks,
        "gradient": STATE_BYTES["gradients"] * trained // ranks,
        "optimizer": STATE_BYTES["optimizer"] * trained // ranks,
        "critic": 4 * whole // ranks if has_critic else 0,
        "old policy": 4 * trained // ranks if algorithm.old_policy == "recomputed" else 0,
    }
    computing = _pass_memory(settings, shape, max(settings.max_tokens_per_microbatch, longest), is_sharded)
    state = (8 * trained + (3 * whole if has_critic else 0)) // ranks
    model = whole + of_adapter if is_first else 0
    files = 2 * min(FILE_BYTES, state)
    host = {
        "process": TRANSFORMERS_BYTES,
        "publications": kept_versions * published,
        "checkpoint copy": state + model + files if saves_beside else 0,
    }
    gathered = 8 * shape.tensor_parameters if is_sharded else 0
    is_copied = is_first and (is_sharded or bool(settings.lora) or not on_cpu)
    copied = state + model if settings.async_checkpoints else model if is_copied else 0
    written = {
        "publish": {"new publication": max(gathered, published)},
        "save": {"checkpoint": gathered if saves_beside else max(gathered, files + copied)},
    }
    read = {"whole model": whole, "files": shape.stored_bytes} if is_first else {}
    load = {"load": {"process": TRANSFORMERS_BYTES, "weights": kept["weights"]} | read}
    parts = {  # the copies of the old policy end with the publication
        "weights": kept["weights"] + kept["critic"] // 4,
        "gradients": kept["gradient"] + kept["critic"] // 4,
        "optimizer": kept["optimizer"] + kept["critic"] // 2,
    }
    asleep = {part: parts[part] for part in settings.kept_asleep()}
    if config.placement.kind != "disaggregated" and not on_cpu and not settings.cpu_offload:
        pinned = [part for part, place in settings.offload.places().items() if place == "host"]
        host["asleep"] = sum(parts[part] for part in pinned)
    name = "trainer" if is_first else "trainer rank"
    num = settings.replicas * (1 if is_first else ranks - 1)
    if on_cpu:
        phases = {"pass": computing} | written
        held = largest_phase({each: host | kept | phase for each, phase in phases.items()} | load)
        return ProcessMemory(name, "cpu", held, {}, num, host | asleep)
    offloaded, resident = (kept, {}) if settings.cpu_offload else ({}, kept)
    in_host = largest_phase({each: host | offloaded | phase for each, phase in written.items()} | load)
    on_device = largest_phase({"pass": {"CUDA": CUDA_BYTES} | resident | computing})
    left = {"CUDA": CUDA_BYTES} | ({} if settings.cpu_offload else asleep)
    return ProcessMemory(name, settings.device, on_device, in_host, num, left)


def _published_bytes(config: RunConfig, shape: ModelShape, adapter: int) -> int:
    return 4 * adapter if config.trainer.adapter else ITEM_BYTES[config.engine.dtype] * shape.num_parameters


def _pass_memory(
    settings: TrainerSettings, shape: ModelShape, tokens: int, is_sharded: bool
) -> dict[str, int]:
    """The largest moment of a forward and backward pass: at the head, or in the backward pass of a block."""
    size, is_trained = ITEM_BYTES[settings.dtype], not settings.lora
    block, outside = shape.block_parameters, shape.outside_parameters
    activations = tokens * block_activation_bytes(shape, size)
    kept = tokens * shape.hidden_size * 4 * shape.num_layers  # the residual stream
    if not settings.activation_checkpointing:
        kept = activations * shape.num_layers
        activations = 0
    if is_sharded:  # gathered in the type of the computation; gradients are reduced in float32
        at_head = {"gathered": size * (outside + block), "new gradient": size * outside if is_trained else 0}
        in_block = {
            "gathered": size * (outside + 3 * block),
            "new gradient": (size * (outside + block) + 4 * block) if is_trained else 0,
        }
        at_end = {"gathered": size * outside, "new gradient": (size + 8) * outside if is_trained else 0}
    else:  # autocast keeps copies of all weights
        cast = {"gathered": 0 if size == 4 else size * shape.num_parameters}
        at_head = cast | {"new gradient": 4 * shape.tensor_parameters if is_trained else 0}
        in_block = at_end = at_head
    return largest_phase(
        {
            "head": {"activations": kept, "logits": _logits(shape, tokens)} | at_head,
            "block": {"activations": kept + activations} | in_block,
            "end": at_end,
        }
    )


def _logits(shape: ModelShape, tokens: int) -> int:
    return max(1, min(tokens, LOGITS_AT_ONCE // shape.vocabulary)) * shape.vocabulary * TRAINED_LOGIT_BYTES


def block_activation_bytes(shape: ModelShape, size: int) -> int:
    """Bytes that one block keeps for the backward pass of one token.

    The residual stream is float32, so norms keep their input and their normalised input in float32. Autocast
    makes a copy of its input for each linear layer. Attention keeps queries, keys, values and its output,
    before and after the sequences are joined; the feed-forward layer both branches, the activation and the
    product. `size`: bytes of a number of the computation.
    """
    hidden, query, kv = shape.hidden_size, shape.query_size, shape.kv_size
    norms = 16 * hidden + (4 + size) * (query + kv) * shape.head_norms
    inputs = size * hidden * (2 if size == 4 else 5)
    return norms + inputs + size * (3 * query + 2 * kv + 4 * shape.mlp_size)


def _reference_memory(shape: ModelShape, settings: TrainerSettings) -> ProcessMemory:
    """The reference computes log-probs as the trainer does."""
    process, weights = {"process": TRANSFORMERS_BYTES}, {"weights": 4 * shape.num_parameters}
    computing = {"computation": _logits(shape, settings.max_tokens_per_microbatch)}
    if settings.device == "cpu":
        return ProcessMemory("reference", "cpu", process | weights | computing, {})
    load = process | weights | {"whole model": 4 * shape.num_parameters, "files": shape.stored_bytes}
    return ProcessMemory("reference", settings.device, {"CUDA": CUDA_BYTES} | weights | computing, load)


def engine_memory(
    shape: ModelShape,
    settings: EngineSettings,
    *,
    context: int,
    adapter_parameters: int = 0,
    has_cuda: bool = True,
) -> ProcessMemory:
    """Estimate the memory of one engine.

    Args:
        context: tokens of a prompt and its completion, at most.
        adapter_parameters: of all LoRA adapters that the engine keeps.
        has_cuda: an inference server computes on CUDA devices; otherwise on the CPU.
    """
    size = ITEM_BYTES[settings.dtype]
    token, num = kv_bytes_per_token(shape, size), settings.num_engines
    weights = {"weights": size * shape.num_parameters, "adapters": size * adapter_parameters}
    if not isinstance(settings, NativeEngineSettings):
        # A server takes the KV cache that its device has room for. One sequence must fit.
        tensor_parallel = settings.tensor_parallel_size
        parts = {"weights": weights["weights"] // tensor_parallel, "KV cache": context * token}
        process = {"process": SERVER_BYTES * tensor_parallel}
        if has_cuda:
            return ProcessMemory("engine", "cuda", parts, process, num, {"CUDA": CUDA_BYTES})
        return ProcessMemory("engine", "cpu", process | parts, {}, num, process)
    kv = token * min(settings.kv_cache_tokens, settings.max_num_seqs * context)
    # The keys and values of all layers, and once more while those of the layers are joined.
    position = 2 * token + size * (4 * shape.hidden_size + 3 * shape.mlp_size)
    prefill = position * min(settings.max_prefill_tokens, settings.max_num_seqs * context)
    decode = settings.max_num_seqs * shape.vocabulary * SAMPLED_LOGIT_BYTES
    loading, host = {"new weights": shape.stored_bytes}, {"process": TORCH_BYTES}
    computing = {"KV cache": kv, "computation": max(prefill, decode)}
    if settings.device == "cpu":
        weights |= {"weights for oneDNN": weights["weights"]}  # Matrix of native/model.py
        phases = {"load": host | weights | loading, "generate": host | weights | computing}
        return ProcessMemory("engine", "cpu", largest_phase(phases), {}, num, host)
    asleep = {"CUDA": CUDA_BYTES}
    on_device = largest_phase({"generate": asleep | weights | computing})
    return ProcessMemory("engine", settings.device, on_device, host | loading, num, asleep)


def kv_bytes_per_token(shape: ModelShape, size: int) -> int:
    """Keys and values of one position in all layers, in numbers of `size` bytes."""
    return 2 * shape.num_layers * shape.kv_size * size


def host_bytes(config: RunConfig, processes: Sequence[ProcessMemory]) -> int:
    """The host memory of all processes at the same time. Colocated engines and trainer take turns."""
    turns = in_turn(processes).values() if config.placement.kind == "colocated" else [processes]
    return max(sum(each.num * each.host_bytes for each in present) for present in turns)


def host_limit() -> int:
    """Memory that processes of this machine, or of this container, may have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_LIMITS:
        if file.is_file() and (text := file.read_text(encoding="utf-8").strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def engines_on_gpu(config: RunConfig) -> bool:
    """Whether the engines compute on a GPU. An inference server does where this machine has one."""
    if isinstance(config.engine, NativeEngineSettings):
        return config.engine.device != "cpu"
    return Path("/proc/driver/nvidia/version").exists()
