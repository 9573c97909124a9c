"""Devices by name. Their rates are peaks of one device, in one direction for links; `SimClusterSettings` says
which share of them is reached."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import ConfigError
from tailrace.sim.settings import SimClusterSettings


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device.

    Args:
        bytes_per_s: bandwidth of its own memory.
        flops: dense bfloat16 operations a second, accumulated in float32.
        link_bytes_per_s: to another device of the same node, in one direction.
        link_latency_s: of an all-reduce of a few kilobytes, for each doubling of the devices.
        host_bytes_per_s: to the memory of the host, in one direction.
        source: document and year of the numbers. No data sheet gives the latency: it is assumed.
    """

    memory_bytes: float
    bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    link_latency_s: float
    host_bytes_per_s: float
    source: str


TABLE = tomllib.loads(Path(__file__).with_name("cluster.toml").read_text(encoding="utf-8"))
PROFILES: Mapping[str, DeviceProfile] = {key: DeviceProfile(**each) for key, each in TABLE["devices"].items()}
"""Devices by the name that `sim.cluster.device` gives."""


def device_of(cluster: SimClusterSettings) -> DeviceProfile:
    """Raises a ConfigError if there is no such profile."""
    if cluster.device not in PROFILES:
        problem = "there is no profile of this name"
        raise ConfigError("sim.cluster.device", cluster.device, problem, f"choose from {', '.join(PROFILES)}")
    return PROFILES[cluster.device]
