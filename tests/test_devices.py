"""Devices are refused by form first, then by what the machine has."""

import pytest
import torch
from pydantic import ValidationError

from tailrace.devices import check_device
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
