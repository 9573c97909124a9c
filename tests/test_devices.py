"""Devices are refused by form first, then by what the machine has."""

from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError

from tailrace.devices import check_device, used_on
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.errors import ConfigError

MALFORMED = ["", "5", "tpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "CUDA", " cpu", "cpu\n"]


@pytest.mark.parametrize("device", MALFORMED)
def test_a_malformed_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r'this is not a device; write "cpu", "cuda" or "cuda:N"'):
        check_device("engine.device", device)
    with pytest.raises(ValidationError, match='a device is "cpu", "cuda" or "cuda:N"'):
        NativeEngineSettings(device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:12"])
def test_a_well_formed_device_is_a_setting(device: str) -> None:
    assert NativeEngineSettings(device=device).device == device


def test_a_cuda_device_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device("engine.device", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"engine.device = 'cuda': torch finds no CUDA device"):
        check_device("engine.device", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("engine.device", "cuda:1")
    with pytest.raises(ConfigError, match="this machine has 2 CUDA devices, numbered from 0; lower N"):
        check_device("engine.device", "cuda:2")


def test_peaks_of_a_gpu_are_in_gib_and_begin_anew_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of torch.cuda have stand-ins: there may be no GPU, and no NVML."""
    peaks, gpu = {"allocated": 3 * 2**29, "reserved": 2**31}, torch.device("cuda", 1)

    def of(name: str) -> Callable[[torch.device], int]:
        return lambda device: peaks[name] * (device == gpu)

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", of("allocated"))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", of("reserved"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update(allocated=2**28))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87 * (device == gpu))
    memory = {"perf/max_memory_allocated_gb": 1.5, "perf/max_memory_reserved_gb": 2.0}
    assert used_on(gpu) == memory | {"perf/gpu_utilization": 0.87}

    def refused(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", refused)
    assert used_on(gpu) == memory | {"perf/max_memory_allocated_gb": 0.25}
    assert used_on(torch.device("cpu")) == {}
