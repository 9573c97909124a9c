"""Choices for a live run from this machine where the config does not set them: types, threads, micro-batch,
KV cache; the memory of its processes; and the messages about a run that is too large."""

import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, Generic

from tailrace.config import Policy, PolicyConfig, RunConfig
from tailrace.contracts.memory import LEAST, MIB, ProcessMemory, gib, in_turn
from tailrace.devices import check_device
from tailrace.drivers.kinds.base import engine_kind, trainer_kind
from tailrace.drivers.kinds.teacher import teacher_kind
from tailrace.drivers.reward.kinds import judge_kind
from tailrace.drivers.trainer.adapter import adapter_parameters
from tailrace.errors import ConfigError
from tailrace.model_folder import context_length
from tailrace.sim.device_profiles import device_of
from tailrace.sim.settings import SimClusterSettings

MICROBATCH, MICROBATCH_GPU, MICROBATCH_LEAST = 1024, 16_384, 256
"""Tokens of a micro-batch that is chosen, at most and at least. A CPU computes larger ones no faster."""
CHOSEN_SHARE = 0.9
"""Share of the memory that choices fill."""
CUDA_BYTES = 600 * MIB
"""CUDA's context and the workspaces of its libraries."""
SMALL_PROCESS_BYTES = 150 * MIB
"""A controller or reward worker, without what reward functions import."""
BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""Flags of processors that compute bfloat16 faster than float32."""
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_TOKENS, _KV = "trainer.max_tokens_per_microbatch", "engine.kv_cache_tokens"
SMALLER = "choose a smaller model, set [trainer.lora] rank = 16, or lower engine.replicas or trainer.replicas"
REMEDIES = {
    "micro-batch": f"lower {_TOKENS} or sampling.max_completion_tokens, or set "
    "trainer.activation_checkpointing = true",
    "KV cache": f"lower {_KV} or engine.max_num_seqs",
    "computation": "lower engine.max_num_seqs or engine.max_prefill_tokens",
    "copies": "set trainer.async_checkpoints = false",
    "asleep": 'write "disk" for parts of [trainer.offload]',
}
"""How the largest part of an estimate becomes smaller."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_limit() -> int:
    """Memory that processes of this machine, or of this container, may have."""
    found = [file.read_text(encoding="utf-8").strip() for file in _CGROUP_LIMITS if file.is_file()]
    limits = [int(text) for text in found if text.isdigit()]
    return min([*limits, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")])


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources that processes of this machine, or of this container, may use.

    Args:
        memory: of the host, in bytes; infinite: it is not known, and counts as enough.
        bfloat16: the first of BFLOAT16 that the processor has.
        gpu_memory: of the largest CUDA device; 0: there is none, or the run does not use it.
        gpu_bfloat16: whether that computes bfloat16.
        gpus: CUDA devices.
        name: in messages.
    """

    cores: int
    memory: float
    bfloat16: str = ""
    gpu_memory: int = 0
    gpu_bfloat16: bool = True
    gpus: int = 0
    name: str = "this machine"

    @classmethod
    def read(cls, *, uses_gpu: bool) -> "Machine":
        """Ask the machine. Imports torch only for a GPU."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if _CPU_LIMIT.is_file():
            quota, period = _CPU_LIMIT.read_text(encoding="utf-8").split()
            cores = min(cores, max(1, int(quota) // int(period))) if quota.isdigit() else cores
        information = Path("/proc/cpuinfo")
        flags = set(information.read_text(encoding="utf-8").split()) if information.is_file() else set()
        bfloat16 = next((flag for flag in BFLOAT16 if flag in flags), "")
        if not uses_gpu:
            return cls(cores, host_limit(), bfloat16)
        import torch

        # Not mem_get_info: it would take memory of the device for this process.
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        found = [(gpu.total_memory, gpu.major) for gpu in gpus]
        largest = max(found, default=(0, 8))
        return cls(cores, host_limit(), bfloat16, largest[0], largest[1] >= 8, len(found))

    @classmethod
    def of(cls, cluster: SimClusterSettings) -> "Machine":
        """A node of a described cluster, of whose host nothing is known: it has the cores of this machine.
        Raises as `device_of`."""
        memory, gpus = int(device_of(cluster).memory_bytes), min(cluster.devices, cluster.devices_per_node)
        here, gpus = cls.read(uses_gpu=False), 0 if cluster.device == "CPU" else gpus
        name = f"a node of [sim.cluster] ({cluster.device})"
        return replace(here, memory=inf, gpu_memory=memory, gpus=gpus, name=name)


def uses_gpu(config: RunConfig) -> bool:
    """Whether workers that the run starts on its machine compute on a GPU."""
    on_gpus = config.engines_on_gpu or config.placement.devices == "gpus"
    return not config.host.gives_devices and (
        on_gpus or any(device != "cpu" for _, device in _named_devices(config))
    )


def _named_devices(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting that names a torch device for workers that the run starts, with the device. Workers
    of other hosts may have others."""
    if config.host.starts("engine") and config.engine.torch_device:
        yield "engine.device", config.engine.torch_device
    if config.host.starts("trainer"):
        yield "trainer.device", config.trainer.device
    for judge in config.reward.judges:
        if device := getattr(judge, "device", ""):
            yield "reward.judges.device", device


def check_devices(config: RunConfig, machine: Machine) -> None:
    """Check that a machine has the devices that a config names. Raises a ConfigError."""
    for key, device in _named_devices(config):
        check_device(key, device, machine.gpus, machine.name)
    placement, there = config.placement, set(range(machine.gpus))
    if placement.devices == "cpus":
        there = set(os.sched_getaffinity(0)) if sys.platform == "linux" else set()
    for key, lists in (("placement.engines", placement.engines), ("placement.trainer", placement.trainer)):
        if missing := sorted({*chain.from_iterable(lists)} - there):
            has = f"{machine.name} has {len(there)} {placement.devices} for this process: {sorted(there)}"
            raise ConfigError(key, lists, f"there is no {missing}; {has}", "list others")


def run_memory(config: PolicyConfig, prompt_tokens: int) -> Iterator[ProcessMemory]:
    """Estimate the memory of all processes that a checked config starts on this machine, where the longest
    prompt has so many tokens. benchmarks/memory.py measures it."""
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


@dataclass(frozen=True, slots=True)
class Fitted(Generic[Policy]):
    """A config with the values that were chosen.

    Args:
        table: the processes with their devices and memory, and the reason of each choice; empty where the run
            is not on this machine.
        memory: of each process, and of all that are there at once, in a line; empty as `table`.
        remarks: settings that a person should look at, such as those that leave cores idle, in words.
        warning: that the memory may not suffice; empty: it does.
    """

    config: Policy
    table: str = ""
    memory: str = ""
    remarks: Sequence[str] = ()
    warning: str = ""


def fit(config: Policy, machine: Machine, *, prompt_tokens: int, overlaps: bool) -> Fitted[Policy]:
    """Choose what a checked config does not set. Raises a ConfigError if weights, optimizer state and the
    smallest KV cache do not fit.

    Args:
        prompt_tokens: of the longest prompt.
        overlaps: the schedule trains while engines generate.
    """
    reasons: dict[str, str] = {}
    idle: list[str] = []
    for choices in (_dtypes, _threads):
        for key, value, reason in choices(config, machine, overlaps):
            if _is_unset(config, key):
                config = _with(config, {key: value})
                reasons[key] = reason
            elif choices is _threads and 0 < (given := _value(config, key) or 0) < value:
                idle.append(f"{key} = {given} leaves cores idle: it could be {value}, {reason}")
    if lack := _shortage(config, machine, prompt_tokens, parts=LEAST):
        raise ConfigError("model.path", str(config.model.path), f"the run needs {lack[0]}", SMALLER)
    sizes = _sizes(config, prompt_tokens)
    fits = (
        each for each in sizes if not _shortage(_with(config, each), machine, prompt_tokens, CHOSEN_SHARE)
    )
    chosen = next(fits, sizes[-1])
    config = _with(config, chosen)
    kind = "CPU" if config.trainer.device == "cpu" else "GPU"
    for key in chosen:
        most = f"; at most {sizes[0][key]:,} on a {kind}" if key == _TOKENS else ""
        reasons[key] = f"the largest power of two with which the run fits{most}"
    warning = ""
    if lack := _shortage(config, machine, prompt_tokens):
        warning = f"the run may need {lack[0]}; {REMEDIES.get(lack[1], SMALLER)}"
    table = _table(config, machine, prompt_tokens, reasons)
    return Fitted(config, table, _memory(config, machine, prompt_tokens), idle, warning)


def _dtypes(config: RunConfig, machine: Machine, _: bool) -> Iterator[tuple[str, Any, str]]:
    gpu = "bfloat16" if machine.gpu_bfloat16 else "float32", "of the GPU"
    cpu = "float32", f"the processor has neither {' nor '.join(BFLOAT16)}"
    if machine.bfloat16:
        cpu = "bfloat16", f"the processor has {machine.bfloat16}"
    yield "trainer.dtype", *(cpu if config.trainer.device == "cpu" else gpu)
    if config.engine.resources:  # a server that runs has a type already
        yield "engine.dtype", *(gpu if config.engines_on_gpu else cpu)


def _threads(config: RunConfig, machine: Machine, overlaps: bool) -> Iterator[tuple[str, Any, str]]:
    engine, trainer, placement = config.engine, config.trainer, config.placement
    keys = ("engine.threads", "trainer.threads")
    num_engines = 0 if config.engines_on_gpu or not engine.resources else engine.num_engines
    nums = (num_engines, trainer.num_processes if trainer.device == "cpu" else 0)
    lists = (placement.engines, placement.trainer) if placement.devices == "cpus" else ((), ())
    listed = [sum(map(len, each)) for each in lists]
    for own, other in ((0, 1), (1, 0)):
        key, cores, reason = keys[own], machine.cores, f"of {machine.cores} cores; "
        if listed[own]:
            cores, reason = listed[own], f"of the {listed[own]} cores that [placement] lists"
        elif nums[other] and overlaps:
            given = 0 if _is_unset(config, keys[other]) else nums[other] * (_value(config, keys[other]) or 0)
            cores = max(1, cores - (listed[other] or given or cores // 2))
            reason += "the schedule trains while engines generate"
        elif nums[other]:
            reason += "the schedule never trains while engines generate"
        else:
            reason += "no other part needs them"
        if nums[own]:
            yield key, max(1, cores // nums[own]), reason


def _sizes(config: PolicyConfig, prompt_tokens: int) -> list[dict[str, int]]:
    """Yield choices for the sizes that the config does not set, the best first."""
    most = MICROBATCH if config.trainer.device == "cpu" else MICROBATCH_GPU
    batches = [{_TOKENS: size} for size in _powers(most, MICROBATCH_LEAST)]
    caches: list[dict[str, int]] = [{}]
    if _is_unset(config, _KV):
        longest = longest_sample(config, prompt_tokens)
        needed = min(_value(config, _KV), config.engine.max_num_seqs * longest)
        caches += [{_KV: size} for size in _powers(needed - 1, longest)]
    return [cache | batch for cache in caches for batch in (batches if _is_unset(config, _TOKENS) else [{}])]


def _powers(most: int, least: int) -> list[int]:
    """Powers of two, the largest first."""
    return [2**n for n in range(most.bit_length() - 1, -1, -1) if 2**n >= least]


def held_at_once(
    config: RunConfig, processes: Sequence[ProcessMemory], machine: Machine
) -> Iterator[tuple[str, float, list[ProcessMemory]]]:
    """Name each memory with its size and the processes that fill it at the same time, with what they hold in
    it as `on_device`. Engines and trainer that share devices take turns."""
    placement = config.placement
    alternate = placement.takes_turns and not placement.lends
    for present in in_turn(processes).values() if alternate else [processes]:
        yield "host memory", machine.memory, [replace(each, on_device=each.host_parts) for each in present]
    lists = {"engine": placement.engines, "trainer": placement.trainer} if placement.devices == "gpus" else {}
    on_gpus: defaultdict[object, list[ProcessMemory]] = defaultdict(list)
    context = {"CUDA": CUDA_BYTES}
    for each in (each for each in processes if each.device != "cpu" and machine.gpu_memory):
        numbers: list[object] = [*chain(*lists.get(each.name, ()))]
        if each.name == "engine" and not config.engine.torch_device:
            numbers = numbers or ["chosen by the server"]
        one = replace(each, num=1, on_device={**context, **each.on_device}, asleep={**context, **each.asleep})
        for number in numbers or [int(each.device.partition(":")[2] or 0)] * each.num:
            on_gpus[number].append(one)
    for beside in on_gpus.values():
        for present in in_turn(beside).values() if placement.takes_turns else [beside]:
            yield f"the memory of {beside[0].device}", machine.gpu_memory, present


def _shortage(
    config: PolicyConfig,
    machine: Machine,
    prompt_tokens: int,
    share: float = 1.0,
    parts: Collection[str] = (),
) -> tuple[str, str] | None:
    """Return the excess of the run over a share of a memory, with its largest part; None: it fits.

    Args:
        parts: that count; empty: all.
    """
    for where, limit, present in held_at_once(config, list(run_memory(config, prompt_tokens)), machine):
        sizes = {
            (each.num, each.name, part): each.num * size
            for each in present
            for part, size in each.on_device.items()
            if not parts or part in parts
        }
        if (needed := sum(sizes.values())) > share * limit:
            num, name, part = max(sizes, key=sizes.__getitem__)
            largest = f"the largest part is {num} x {name}: {part} {gib(sizes[num, name, part])}"
            return f"{gib(needed)} of {where}, and {machine.name} has {gib(limit)}; {largest}", part
    return None


def _is_unset(config: RunConfig, key: str) -> bool:
    """Whether the config leaves a setting to the machine. Not every kind of engine has each."""
    name, _, field = key.partition(".")
    section = getattr(config, name)
    return field in type(section).model_fields and field not in section.model_fields_set


def _value(config: RunConfig, key: str) -> Any:
    section, _, field = key.partition(".")
    return getattr(getattr(config, section), field, None)


def _with(config: Policy, values: Mapping[str, Any]) -> Policy:
    """The config with other values, by dotted key."""
    for key, value in values.items():
        name, _, field = key.partition(".")
        config = config.changed(**{name: {field: value}})
    return config


def _table(config: PolicyConfig, machine: Machine, prompt_tokens: int, reasons: Mapping[str, str]) -> str:
    """Processes with devices, threads, types, micro-batch and estimated memory, and why; 77 columns wide."""
    layout, processes = "{:31} {:>6} {:>7} {:>8} {:>11} {:>9}", list(run_memory(config, prompt_tokens))
    rows = [layout.format("process", "device", "threads", "dtype", "micro-batch", "memory")]
    for each in processes:
        computes = each.name.startswith(("trainer", "reference"))
        settings = config.engine if each.name == "engine" else config.trainer if computes else None
        cells = [getattr(settings, name, "") for name in ("threads", "dtype", "max_tokens_per_microbatch")]
        cells[2] = f"{cells[2]:,}" if cells[2] else ""
        number = f" x {each.num}" if each.num > 1 else ""
        rows.append(layout.format(f"{each.name}{number}", each.device, *cells, gib(_held(each))))
    rows += _most(config, processes, machine)
    for key, reason in reasons.items():
        value = _value(config, key)
        value = f"{value:,}" if isinstance(value, int) else value
        rows += textwrap.wrap(f"{key} = {value}: {reason}", 77, subsequent_indent="  ")
    return "\n".join(rows)


def _memory(config: PolicyConfig, machine: Machine, prompt_tokens: int) -> str:
    """The estimated memory of each process, and of all that are there at once."""
    processes = [*run_memory(config, prompt_tokens)]
    each = (f"{f'{one.num} x ' * (one.num > 1)}{one.name} {gib(_held(one))}" for one in processes)
    return f"{', '.join(each)}; {'; '.join(_most(config, processes, machine))}"


def _held(process: ProcessMemory) -> int:
    """Bytes of one process, on its device or else on the host."""
    return sum(process.host_parts.values()) if process.device == "cpu" else process.device_bytes


def _most(config: RunConfig, processes: Sequence[ProcessMemory], machine: Machine) -> list[str]:
    """Say how much of each memory is held at once, at most."""
    most: dict[str, tuple[int, float]] = {}
    for where, limit, present in held_at_once(config, processes, machine):
        held = sum(each.num * each.device_bytes for each in present)
        most[where] = max(most.get(where, (0, limit)), (held, limit))
    return [
        f"{where}, at most: {gib(held)}" + (f" of {gib(limit)}" if limit < inf else "")
        for where, (held, limit) in most.items()
    ]
