"""Memory that a run needs, process by process, as an upper bound. Imports no torch.

Certain are the parts in memory.LEAST. The others are bounds of a pass over one micro-batch, and of the copies
of the weights that exist while a model is read, published or saved. benchmarks/memory.py measures both.
"""

from collections.abc import Iterator

from tailrace.config import PolicyConfig
from tailrace.contracts.memory import MIB, ProcessMemory
from tailrace.drivers.kinds.base import engine_kind, trainer_kind
from tailrace.drivers.kinds.teacher import teacher_kind
from tailrace.drivers.reward.kinds import judge_kind
from tailrace.drivers.trainer.adapter import adapter_parameters
from tailrace.model_folder import context_length

SMALL_PROCESS_BYTES = 150 * MIB
"""A controller or reward worker, without what reward functions import."""


def run_memory(config: PolicyConfig, prompt_tokens: int) -> Iterator[ProcessMemory]:
    """Estimate the memory of all processes that a checked config starts on this machine, where the longest
    prompt has so many tokens."""
    adapter, longest = config.trainer.adapter, longest_sample(config, prompt_tokens)
    adapters = adapter_parameters(config.model.path, adapter) * config.num_versions
    yield from trainer_kind(config).memory(config, longest)
    yield from engine_kind(config).memory(config, longest, adapters)
    for teacher in config.teacher:
        yield from teacher_kind(teacher).memory(teacher, config)
    for judge in config.reward.judges:
        yield from judge_kind(judge).memory(judge)
    small = {"process": SMALL_PROCESS_BYTES}
    yield ProcessMemory("controller, reward workers", "cpu", {}, small, config.reward.workers + 1)


def longest_sample(config: PolicyConfig, prompt_tokens: int) -> int:
    """Tokens of the longest sample. Those of an environment fill the context."""
    context = context_length(config.model.path)
    if config.environment.has_turns:
        return context
    sources = config.data.sources if config.data else ()
    limits = [source.max_prompt_tokens or context for source in sources] or [context]
    return min(context, min(prompt_tokens, max(limits)) + config.sampling.max_completion_tokens)
