"""What memory a run needs, process by process, against what this machine has."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tailrace.config import RunConfig
from tailrace.data.base import sources_of
from tailrace.engine.memory import engine_memory
from tailrace.engine.settings import NativeEngineSettings
from tailrace.environments.settings import EpisodeSettings
from tailrace.memory import ITEM_BYTES, ModelShape, ProcessMemory
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


def run_memory(config: RunConfig, prompt_tokens: int) -> Iterator[ProcessMemory]:
    """Estimate the memory of all processes that a checked config starts on this machine.

    Args:
        prompt_tokens: of the longest prompt.
    """
    assert config.model and config.sampling
    path, trainer, engine = config.model.path, config.trainer, config.engine
    shape, joined = ModelShape.read(path), config.broker.joined if config.broker.url else ()
    longest = longest_sample(config, prompt_tokens)
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
            saves_beside=trainer.async_checkpoints and config.run.checkpoint_every > 0,
        )
        for is_first in (True, False):
            if (process := trainer_memory(shape, trainer, work, is_first=is_first, longest=longest)).num:
                yield process
    if isinstance(engine, NativeEngineSettings) or not engine.urls:
        kept = sum(outputs * inputs for outputs, inputs in modules.values()) if trainer.adapter else 0
        yield engine_memory(
            shape, engine, context=longest, adapted_parameters=kept, has_cuda=engines_on_gpu(config)
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
    yield ProcessMemory("controller, reward workers", "cpu", small, {}, config.reward.workers + 1)


def longest_sample(config: RunConfig, prompt_tokens: int) -> int:
    """Tokens of the longest sample. Those of an environment fill the context."""
    assert config.model and config.data and config.sampling
    context = context_length(config.model.path)
    if isinstance(config.environment, EpisodeSettings):
        return context
    limits = [source.max_prompt_tokens or context for source in sources_of(config.data)]
    return min(context, min(prompt_tokens, max(limits)) + config.sampling.max_completion_tokens)


def _without_training(trainer: ProcessMemory) -> ProcessMemory:
    """The reference computes log-probs as the trainer does."""
    kept = {name: size for name, size in trainer.on_device.items() if name in ("process", "CUDA", "weights")}
    computing = {"computation": trainer.on_device.get("logits", 0)}
    return ProcessMemory("reference", trainer.device, kept | computing, trainer.in_host)


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


def host_limit() -> int:
    """Memory that processes of this machine, or of this container, may have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_LIMITS:
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def engines_on_gpu(config: RunConfig) -> bool:
    """Whether the engines compute on a GPU. An inference server does where this machine has one."""
    if isinstance(config.engine, NativeEngineSettings):
        return config.engine.device != "cpu"
    return Path("/proc/driver/nvidia/version").exists()
