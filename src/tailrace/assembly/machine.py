"""What a live run takes from this machine where the config does not set it: types, threads, micro-batch, KV
cache; and the refusal of a run that cannot fit."""

import os
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tailrace.assembly.memory import engines_on_gpu, host_bytes, host_limit, longest_sample, run_memory
from tailrace.config import RunConfig
from tailrace.data.base import MixtureSettings
from tailrace.engine.settings import NativeEngineSettings
from tailrace.errors import ConfigError
from tailrace.memory import ProcessMemory, gib, in_turn
from tailrace.trainer.base import LoraSettings, OffloadSettings, Place

MICROBATCH, MICROBATCH_GPU, MICROBATCH_LEAST = 1024, 16_384, 256
"""Tokens of a micro-batch that is chosen, at most and at least. A CPU computes larger ones no faster."""
CHOSEN_SHARE = 0.9
"""Of the memory that choices fill. The estimate may be lower than the peak."""
BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""Flags of processors that compute bfloat16 faster than float32."""
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_TOKENS, _KV = "trainer.max_tokens_per_microbatch", "engine.kv_cache_tokens"


@dataclass(frozen=True, slots=True)
class Machine:
    """What processes of this machine, or of this container, may use.

    Args:
        memory: of the host, in bytes.
        bfloat16: the first of BFLOAT16 that the processor has.
        gpu_memory: of the largest CUDA device; 0: there is none, or the run does not use it.
        gpu_bfloat16: whether that computes bfloat16.
    """

    cores: int
    memory: int
    bfloat16: str = ""
    gpu_memory: int = 0
    gpu_bfloat16: bool = True

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
        largest = max(((gpu.total_memory, gpu.major) for gpu in gpus), default=(0, 8))
        return cls(cores, host_limit(), bfloat16, largest[0], largest[1] >= 8)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A config with the values that were chosen.

    Args:
        table: the processes with their devices and memory, and the reason of each choice; empty where the run
            is not on this machine.
        remarks: settings that a person should look at, such as those that leave cores idle, in words.
    """

    config: RunConfig
    table: str = ""
    remarks: Sequence[str] = ()


def fit(config: RunConfig, machine: Machine, *, prompt_tokens: int, overlaps: bool) -> Fitted:
    """Choose what a checked config does not set. Raises a ConfigError if the run cannot fit; it
    names what would.

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
    sizes = _sizes(config, prompt_tokens)
    tries = [(share, size) for share in (CHOSEN_SHARE, 1.0) for size in sizes]
    fits = (
        size for share, size in tries if not _shortage(_with(config, size), machine, prompt_tokens, share)
    )
    chosen = next(fits, None)
    if chosen is None:
        raise _refusal(config, _with(config, sizes[-1]), machine, prompt_tokens)
    kind = "CPU" if config.trainer.device == "cpu" else "GPU"
    for key in chosen:
        most = f"; at most {sizes[0][key]:,} on a {kind}" if key == _TOKENS else ""
        reasons[key] = f"the largest power of two with which the run fits{most}"
    config = _with(config, chosen)
    return Fitted(config, _table(config, machine, list(run_memory(config, prompt_tokens)), reasons), idle)


def _dtypes(config: RunConfig, machine: Machine, _: bool) -> Iterator[tuple[str, Any, str]]:
    of_trainer, of_engines = config.trainer.device != "cpu", engines_on_gpu(config)
    for key, is_gpu in (("trainer.dtype", of_trainer), ("engine.dtype", of_engines)):
        if key == "engine.dtype" and _is_joined(config):
            continue  # the server has a type already
        if is_gpu:
            yield key, "bfloat16" if machine.gpu_bfloat16 else "float32", "of the GPU"
        elif machine.bfloat16:
            yield key, "bfloat16", f"the processor has {machine.bfloat16}"
        else:
            yield key, "float32", f"the processor has neither {' nor '.join(BFLOAT16)}"


def _is_joined(config: RunConfig) -> bool:
    """Whether the engines are servers that run already."""
    return not isinstance(config.engine, NativeEngineSettings) and bool(config.engine.urls)


def _threads(config: RunConfig, machine: Machine, overlaps: bool) -> Iterator[tuple[str, Any, str]]:
    engine, trainer, placement = config.engine, config.trainer, config.placement
    num_engines = 0 if _is_joined(config) or engines_on_gpu(config) else engine.num_engines
    num_trainers = trainer.ranks * trainer.replicas if trainer.device == "cpu" else 0
    lists = (placement.engines, placement.trainer) if placement.devices == "cpus" else ((), ())
    of_engines, of_trainer = (sum(map(len, each)) for each in lists)
    for key, num, others, listed, other_listed in (
        ("engine.threads", num_engines, num_trainers, of_engines, of_trainer),
        ("trainer.threads", num_trainers, num_engines, of_trainer, of_engines),
    ):
        if listed:
            cores, reason = listed, f"of the {listed} cores that [placement] lists"
        elif others and overlaps:
            other = "trainer.threads" if key == "engine.threads" else "engine.threads"
            given = 0 if _is_unset(config, other) else others * (_value(config, other) or 0)
            cores = max(1, machine.cores - (other_listed or given or machine.cores // 2))
            reason = f"of {machine.cores} cores; the schedule trains while engines generate"
        else:
            cores = machine.cores
            alone = (
                "the schedule never trains while engines generate" if others else "no other part needs them"
            )
            reason = f"of {machine.cores} cores; {alone}"
        if num:
            yield key, max(1, cores // num), reason


def _sizes(config: RunConfig, prompt_tokens: int) -> list[dict[str, int]]:
    """What may be chosen for the sizes that the config does not set, the best first."""
    most = MICROBATCH if config.trainer.device == "cpu" else MICROBATCH_GPU
    tokens: Sequence[dict[str, int]] = [{}]
    if _is_unset(config, _TOKENS):
        tokens = [{_TOKENS: size} for size in _powers(most, MICROBATCH_LEAST)]
    caches: Sequence[dict[str, int]] = [{}]
    if isinstance(config.engine, NativeEngineSettings) and _is_unset(config, _KV):
        longest = longest_sample(config, prompt_tokens)
        needed = min(config.engine.kv_cache_tokens, config.engine.max_num_seqs * longest)
        caches = [{}, *({_KV: size} for size in _powers(needed - 1, longest))]
    return [batch | cache for cache in caches for batch in tokens]


def _powers(most: int, least: int) -> list[int]:
    """Powers of two, the largest first."""
    return [2**n for n in range(most.bit_length() - 1, -1, -1) if 2**n >= least]


def _shortage(config: RunConfig, machine: Machine, prompt_tokens: int, share: float = 1.0) -> str:
    """What the run needs more of than a share of the machine's memory; empty: it fits."""
    processes = list(run_memory(config, prompt_tokens))
    if (needed := host_bytes(config, processes)) > share * machine.memory:
        largest = max(processes, key=lambda each: each.num * each.host_bytes)
        return _need("host memory", needed, machine.memory, largest)
    for beside, is_fixed in on_each_gpu(config, processes, machine) if machine.gpu_memory else ():
        limit = machine.gpu_memory * (1.0 if is_fixed else share)
        if (needed := sum(each.device_bytes for each in beside)) > limit:
            largest = max(beside, key=lambda each: each.device_bytes)
            return _need(f"the memory of {largest.device}", needed, machine.gpu_memory, largest)
    return ""


def on_each_gpu(
    config: RunConfig, processes: Sequence[ProcessMemory], machine: Machine
) -> Iterator[tuple[list[ProcessMemory], bool]]:
    """The processes that hold the memory of one GPU at the same time, and whether a server takes its share of
    it; one that is there twice counts twice.

    A process with a list of GPUs computes on the first, a server on all. Servers without one choose their
    devices. Engines and trainer that share devices take turns.
    """
    in_turns = config.placement.kind != "disaggregated"
    server = None if isinstance(config.engine, NativeEngineSettings) else config.engine
    placement, ranks = config.placement, config.trainer.ranks
    engines, trainer = (placement.engines, placement.trainer) if placement.devices == "gpus" else ((), ())
    numbers = {
        "engine": [gpu for gpus in engines for gpu in (gpus if server else gpus[:1])],
        "trainer": [gpus[0] for gpus in trainer],
        "trainer rank": [gpus[rank * len(gpus) // ranks] for gpus in trainer for rank in range(1, ranks)],
    }
    found: defaultdict[int, list[ProcessMemory]] = defaultdict(list)
    for each in (each for each in processes if each.device != "cpu"):
        if each.name == "engine" and server:
            if not in_turns:
                yield [each], False
                continue
            room = int(server.memory_share * machine.gpu_memory) - each.on_device["weights"]
            taken = {"KV cache": max(room, each.on_device["KV cache"])}
            each = replace(each, on_device={**each.on_device, **taken})
        unlisted = [int(each.device.partition(":")[2] or 0)] * each.num
        for gpu in numbers.get(each.name) or unlisted:
            found[gpu].append(each)
    for beside in found.values():
        for turn, present in (in_turn(beside) if in_turns else {"": beside}).items():
            yield present, turn == "generating" and server is not None


def _need(where: str, needed: int, limit: int, largest: ProcessMemory) -> str:
    parts = dict(largest.on_device) or dict(largest.in_host)
    named = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
    return (
        f"the run needs {gib(needed)} of {where}, and this machine has {gib(limit)}; "
        f"the largest part is {largest.num} x {largest.name}: {named}"
    )


def _refusal(given: RunConfig, config: RunConfig, machine: Machine, prompt_tokens: int) -> ConfigError:
    """The error of a run that does not fit with the least that may be chosen, as in `config`. It names each
    change with which the run fits, or all of them."""
    assert config.model
    problem = _shortage(config, machine, prompt_tokens)
    remedies = _remedies(config, prompt_tokens)
    alone: dict[str, Any] = {}
    for key, values in remedies.items():
        fits = (each for each in values if not _shortage(_with(config, {key: each}), machine, prompt_tokens))
        if (value := next(fits, None)) is not None:
            alone[key] = value
    least = {key: values[-1] for key, values in remedies.items()}
    if alone:
        remedy = f"set {', or '.join(_words(key, value) for key, value in alone.items())}"
    else:
        together = " and ".join(_words(key, value) for key, value in least.items())
        short = _shortage(_with(config, least), machine, prompt_tokens).partition(";")[0]
        remedy = f"choose a smaller model: with {together}, {short}" if short else f"set {together}"
    if _TOKENS in alone and not _is_unset(given, _TOKENS):
        return ConfigError(_TOKENS, config.trainer.max_tokens_per_microbatch, problem, remedy)
    return ConfigError("model.path", str(config.model.path), problem, remedy)


def _remedies(config: RunConfig, prompt_tokens: int) -> dict[str, list[Any]]:
    """Settings that save memory, with the values to try, the smallest change first."""
    trainer, engine = config.trainer, config.engine
    is_mixture = isinstance(config.data, MixtureSettings)
    found: dict[str, list[Any]] = {
        _TOKENS: _powers(trainer.max_tokens_per_microbatch - 1, MICROBATCH_LEAST),
        "trainer.activation_checkpointing": [] if trainer.activation_checkpointing else [True],
        "data.max_prompt_tokens": [] if is_mixture else _powers(prompt_tokens - 1, 64),
        "trainer.async_checkpoints": [False] if trainer.async_checkpoints else [],
        "trainer.lora": [] if trainer.lora else [LoraSettings()],
    }
    if config.placement.kind != "disaggregated" and trainer.kept_asleep():
        place: Place = "disk" if trainer.device == "cpu" else "host"
        found["trainer.offload"] = [OffloadSettings(weights=place, gradients=place, optimizer=place)]
    if isinstance(engine, NativeEngineSettings):
        found[_KV] = _powers(engine.kv_cache_tokens - 1, longest_sample(config, prompt_tokens))
        found["engine.max_num_seqs"] = _powers(engine.max_num_seqs - 1, 1)
    if config.sampling:
        found["sampling.max_completion_tokens"] = _powers(config.sampling.max_completion_tokens - 1, 64)
    return {key: values for key, values in found.items() if values}


def _words(key: str, value: Any) -> str:
    if isinstance(value, LoraSettings):
        return f"[{key}] rank = {value.rank}"
    if isinstance(value, OffloadSettings):
        return f"weights, gradients and optimizer of [{key}] = '{value.weights}'"
    return f"{key} = {str(value).lower()}"


def _is_unset(config: RunConfig, key: str) -> bool:
    """Whether the config leaves a setting to the machine. Not every kind of engine has each."""
    name, _, field = key.partition(".")
    section = getattr(config, name)
    return field in type(section).model_fields and field not in section.model_fields_set


def _value(config: RunConfig, key: str) -> Any:
    section, _, field = key.partition(".")
    return getattr(getattr(config, section), field, None)


def _with(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The config with other values, by dotted key."""
    for key, value in values.items():
        name, _, field = key.partition(".")
        section = getattr(config, name).model_copy(update={field: value})
        config = config.model_copy(update={name: section})
    return config


def _table(
    config: RunConfig, machine: Machine, processes: Sequence[ProcessMemory], reasons: Mapping[str, str]
) -> str:
    """Processes with devices, threads, types, micro-batch and estimated memory, and why; 77 columns wide."""

    def row(*cells: object) -> str:
        return "{:31} {:>6} {:>7} {:>8} {:>11} {:>9}".format(*map(str, cells)).rstrip()

    rows = [row("process", "device", "threads", "dtype", "micro-batch", "memory")]
    for each in processes:
        computes = each.name.startswith(("trainer", "reference"))
        settings = config.engine if each.name == "engine" else config.trainer if computes else None
        cells = [getattr(settings, name, "") for name in ("threads", "dtype", "max_tokens_per_microbatch")]
        cells[2] = f"{cells[2]:,}" if cells[2] else ""
        number = f" x {each.num}" if each.num > 1 else ""
        rows.append(row(f"{each.name}{number}", each.device, *cells, gib(each.device_bytes)))
        if each.in_host:
            rows.append(row("  its host memory", "cpu", "", "", "", gib(sum(each.in_host.values()))))
        if config.placement.kind != "disaggregated" and each.asleep:
            rows.append(row("  asleep", each.device, "", "", "", gib(sum(each.asleep.values()))))
    needed = host_bytes(config, processes)
    rows.append(f"host memory, estimated: {gib(needed)} of {gib(machine.memory)}")
    beside = on_each_gpu(config, processes, machine) if machine.gpu_memory else ()
    if gpus := [sum(each.device_bytes for each in present) for present, _ in beside]:
        rows.append(f"memory of a GPU, estimated: {gib(max(gpus))} of {gib(machine.gpu_memory)}")
    for key, reason in reasons.items():
        value = _value(config, key)
        value = f"{value:,}" if isinstance(value, int) else value
        rows += textwrap.wrap(f"{key} = {value}: {reason}", 77, subsequent_indent="  ")
    return "\n".join(rows)
