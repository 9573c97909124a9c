"""Torch devices as settings name them, the devices that one process may use, and the kernels with which it
computes attention."""

import re
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from tailrace.errors import ConfigError
from tailrace.settings import Shared

if TYPE_CHECKING:
    from torch import Tensor, device

_FORM = re.compile(r"cpu|cuda(?::(\d{1,3}))?")
_FORMS = '"cpu", "cuda" or "cuda:N"'


def _well_formed(device: str) -> str:
    if not _FORM.fullmatch(device):
        raise ValueError(f"a device is {_FORMS}")
    return device


Device = Annotated[Shared[str], AfterValidator(_well_formed)]
"""A setting of the form "cpu", "cuda" or "cuda:N". Whether the machine has the device: `check_device`."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices that one process may use.

    Args:
        cpus: the CPUs that it is pinned to, on Linux; empty: any.
        gpus: numbers of the CUDA devices that it sees; empty: those of the environment.
    """

    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The devices of each process.

    Args:
        engines: of each engine; None: whatever the machine has.
        trainer: of each rank of the trainer, all ranks of replica 0 first.
    """

    engines: tuple[Devices | None, ...]
    trainer: tuple[Devices | None, ...]


def num_gpus() -> int:
    """CUDA devices that torch finds. Imports torch."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_device(key: str, device: str, gpus: int | None = None, machine: str = "this machine") -> None:
    """Check that a machine has a device. Raises a ConfigError if the name is malformed, or there is no such
    CUDA device.

    Args:
        key: the setting that names the device, such as "engine.device".
        gpus: CUDA devices of the machine; None: of this one, which imports torch for a CUDA device.
        machine: its name in the message.
    """
    form = _FORM.fullmatch(device)
    if form is None:
        raise ConfigError(key, device, "this is not a device", f"write {_FORMS}")
    if device == "cpu":
        return
    count = num_gpus() if gpus is None else gpus
    if count == 0:
        raise ConfigError(key, device, f"torch finds no CUDA device on {machine}", 'write "cpu"')
    if int(form[1] or 0) >= count:
        raise ConfigError(key, device, f"{machine} has {count} CUDA devices, numbered from 0", "lower N")


def used_on(name: "str | device") -> dict[str, float]:
    """Return figures of a device by name (record/figures.py); none of a CPU. The peaks are those of this
    process since the last call. Imports torch."""
    import torch

    gpu = torch.device(name)
    if gpu.type == "cpu":
        return {}
    peaks = (torch.cuda.max_memory_allocated(gpu), torch.cuda.max_memory_reserved(gpu))
    torch.cuda.reset_peak_memory_stats(gpu)
    keys = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")
    figures = {key: peak / 2**30 for key, peak in zip(keys, peaks, strict=True)}
    with suppress(Exception):  # pynvml is not installed, or NVML refuses, as for a part of a GPU (MIG)
        figures["perf/gpu_utilization"] = torch.cuda.utilization(gpu) / 100
    return figures


def attention_kernels() -> AbstractContextManager[object]:
    """Inside the block scaled_dot_product_attention is Flash attention, the memory-efficient kernel or math.
    cuDNN, which torch prefers on some GPUs, makes a plan for each shape, and each decode step has new shapes.
    Imports torch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels)


def for_fused_attention(query: "Tensor", key: "Tensor", value: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return keys and values, [N, heads, T, D], as a fused kernel takes them. In float32 on CUDA none takes
    grouped heads, and math would make [heads, T, T]: there they are repeated for each query head."""
    if query.device.type != "cuda" or query.dtype.itemsize == 2:
        return key, value
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
