"""What memory a run needs, process by process, against what this machine has."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tailrace.config import RunConfig
from tailrace.data.base import sources_of
from tailrace.engine.memory import engine_memory
from tailrace.engine.settings import NativeEngineSettings
from tailrace.environments.settings import EpisodeSettings
from tailrace.errors import ConfigError
from tailrace.memory import ITEM_BYTES, ModelShape, ProcessMemory, gib
from tailrace.model_folder import context_length
from tailrace.reward.judge_memory import judge_memory
from tailrace.reward.judge_settings import LocalJudgeSettings
from tailrace.trainer.adapter import adapted_modules
from tailrace.trainer.memory import TrainerWork, trainer_memory
from tailrace.weights.base import KEPT_VERSIONS, ProcessGroupSettings, SharedMemorySettings

SMALL_PROCESS_BYTES = 150 * 2**20
"""The controller, and each reward worker, without what reward functions import."""
_LENT = ("KV cache", "computation", "activations", "logits", "gathered", "new gradient", "checkpoint")
"""Parts that a process holds while it works. The weights of an engine are not among them: it gives them back,
but takes them again before the trainer has published."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def run_memory(config: RunConfig) -> list[ProcessMemory]:
    """Estimate the memory of all processes that a checked config starts on this machine."""
    return list(_processes(config))


def _processes(config: RunConfig) -> Iterator[ProcessMemory]:
    assert config.model and config.data and config.sampling
    path, trainer, engine = config.model.path, config.trainer, config.engine
    shape, joined = ModelShape.read(path), config.broker.joined if config.broker.url else ()
    modules = adapted_modules(path, trainer.lora) if trainer.lora else {}
    rank = trainer.lora.rank if trainer.lora else 0
    adapter = sum(rank * (outputs + inputs) for outputs, inputs in modules.values())
    published = 4 * adapter if trainer.adapter else ITEM_BYTES[engine.dtype] * shape.num_parameters
    if "trainer" not in joined:
        work = TrainerWork(
            adapter_parameters=adapter if trainer.lora else None,
            published_bytes=published,
            kept_publications=KEPT_VERSIONS if isinstance(config.weights, ProcessGroupSettings) else 0,
            has_critic=config.algorithm.advantage == "gae",
            keeps_old_policy=config.algorithm.old_policy == "recomputed",
        )
        longest = _longest_sample(config)
        for is_first in (True, False):
            if (process := trainer_memory(shape, trainer, work, is_first=is_first, longest=longest)).num:
                yield process
    if isinstance(engine, NativeEngineSettings) or not engine.urls:
        completion = config.sampling.max_completion_tokens
        limits = [source.max_prompt_tokens or context_length(path) for source in sources_of(config.data)]
        longest = max(limits) + completion
        kept = sum(outputs * inputs for outputs, inputs in modules.values()) if trainer.adapter else 0
        context = context_length(path)
        if not isinstance(config.environment, EpisodeSettings):  # its tokens fill the context
            context = min(context, longest)
        yield engine_memory(
            shape, engine, context=context, adapted_parameters=kept, has_cuda=_has_nvidia_driver()
        )
    if config.algorithm.needs_reference and not trainer.lora and "reference" not in joined:
        alone = trainer.model_copy(update={"ranks": 1, "replicas": 1, "cpu_offload": False})
        yield _without_training(trainer_memory(shape, alone, TrainerWork(), is_first=True))
    if isinstance(config.weights, SharedMemorySettings):
        kept_versions = {"versions": (KEPT_VERSIONS + 1) * published}
        yield ProcessMemory("weights in /dev/shm", "cpu", kept_versions, {})
    for judge in config.reward.judges:
        if isinstance(judge, LocalJudgeSettings):
            yield judge_memory(judge)
    small = {"process": SMALL_PROCESS_BYTES}
    yield ProcessMemory("controller and reward workers", "cpu", small, {}, config.reward.workers + 1)


def _longest_sample(config: RunConfig) -> int:
    """Tokens of one sequence of the trainer, as far as they are bounded: prompts count where
    `max_prompt_tokens` bounds them, and the tokens of an environment fill the context."""
    assert config.model and config.data and config.sampling
    context = context_length(config.model.path)
    if isinstance(config.environment, EpisodeSettings):
        return context
    prompts = [source.max_prompt_tokens or 0 for source in sources_of(config.data)]
    return min(context, max(prompts) + config.sampling.max_completion_tokens)


def _without_training(trainer: ProcessMemory) -> ProcessMemory:
    """The reference computes log-probs as the trainer does."""
    kept = {name: size for name, size in trainer.on_device.items() if name in ("process", "CUDA", "weights")}
    computing = {"computation": trainer.on_device.get("logits", 0)}
    return ProcessMemory("reference", trainer.device, kept | computing, trainer.in_host)


def memory_table(processes: Sequence[ProcessMemory], *, in_turn: bool = False) -> str:
    """The estimate in words: a line for each kind of process, then the sum and what the machine has.

    Args:
        in_turn: engines and trainer have the same devices in turn.
    """
    lines = ["memory, estimated:"]
    for each in processes:
        number = f"{each.num} x " if each.num > 1 else ""
        for place, parts in ((each.device, each.on_device), ("host", each.in_host)):
            if parts:
                named = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
                place = "host" if place == "cpu" else place
                lines.append(f"  {each.name}: {number}{gib(sum(parts.values()))} on {place} ({named})")
    lines.append(f"  host: {gib(host_bytes(processes, in_turn=in_turn))} of {gib(host_limit())}")
    return "\n".join(lines)


def host_bytes(processes: Sequence[ProcessMemory], *, in_turn: bool = False) -> int:
    """The host memory of all processes at the same time.

    Args:
        in_turn: engines sleep while the trainer computes, and have then given their memory back.
    """
    total = sum(each.num * each.host_bytes for each in processes)
    return total - min(map(_lent, _by_role(processes))) if in_turn else total


def _by_role(processes: Sequence[ProcessMemory]) -> tuple[list[ProcessMemory], list[ProcessMemory]]:
    """Engines, and the processes of the trainer."""
    engines = [each for each in processes if each.name == "engine"]
    return engines, [each for each in processes if each.name.startswith("trainer")]


def _lent(processes: Sequence[ProcessMemory]) -> int:
    """Host memory that is free while the processes do nothing."""
    on_cpu = [each for each in processes if each.device == "cpu"]
    return sum(each.num * sum(each.on_device.get(part, 0) for part in _LENT) for each in on_cpu)


def check_memory(processes: Sequence[ProcessMemory], model: Path, *, in_turn: bool = False) -> None:
    """Refuse processes that cannot fit this machine together.

    Args:
        in_turn: as of `host_bytes`.

    Raises:
        ConfigError: the host, or the device of a process, has less memory than the estimate.
    """
    if (needed := host_bytes(processes, in_turn=in_turn)) > (limit := host_limit()):
        largest = max(processes, key=lambda each: each.num * each.host_bytes)
        raise _too_large(model, "host memory", needed, limit, largest)
    on_gpu = [each for each in processes if each.device != "cpu"]
    available = _largest_gpu() if on_gpu else 0
    for each in on_gpu:
        if available and each.device_bytes > available:
            raise _too_large(model, f"the memory of {each.device}", each.device_bytes, available, each)


def _too_large(model: Path, where: str, needed: int, limit: int, largest: ProcessMemory) -> ConfigError:
    parts = dict(largest.on_device) or dict(largest.in_host)
    named = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
    problem = (
        f"the run needs {gib(needed)} of {where}, and this machine has {gib(limit)}; "
        f"the largest part is {largest.num} x {largest.name}: {named}"
    )
    return ConfigError("model.path", str(model), problem, largest.advice or "choose a smaller model")


def host_limit() -> int:
    """Memory that processes of this machine, or of this container, may have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_LIMITS:
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _largest_gpu() -> int:
    """Total memory of the largest CUDA device; 0: there is none."""
    import torch

    if not torch.cuda.is_available():
        return 0
    # Not mem_get_info: it would take memory of the device for this process.
    indices = range(torch.cuda.device_count())
    return max(torch.cuda.get_device_properties(index).total_memory for index in indices)
