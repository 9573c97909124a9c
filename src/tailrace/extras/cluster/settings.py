"""Settings of a Ray cluster."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tailrace.drivers.workers.base import HostSettings
from tailrace.settings import Settings


def _amount(amount: float) -> float:
    if amount > 1 and not amount.is_integer():
        raise ValueError("an amount above 1 is a whole number")
    return amount


Amount = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_amount)]


Resources = Annotated[Mapping[str, Amount], Field(min_length=1)]
"""Amounts of Ray's resources by name: "CPU", "GPU", "memory" in bytes, or a name that `ray start --resources`
gave a node. An amount is a fraction of 1, or a whole number."""


class RoleResources(Settings):
    """Resources that one worker of each role takes of its node: by name, a fraction of 1 or a whole number
    each. Without an entry: CPU, its threads, and GPU, 1 if its device is CUDA."""

    engine: Resources | None = None
    """One engine, for example `{ CPU = 4, GPU = 1, fast_gpu = 1 }`."""
    trainer: Resources | None = None
    """One rank of the trainer."""
    reward: Resources | None = None
    """One reward worker."""
    reference: Resources | None = None
    """The reference model."""


class RayHostSettings(HostSettings):
    """The nodes of a Ray cluster, of which the machine on which the run is started must be one."""

    gives_devices = True
    kind: Literal["ray"] = "ray"
    """Selects this kind of host."""
    address: str = Field(default="auto", min_length=1)
    """Address of the cluster: `host:port`. "auto": the cluster that runs on this machine."""
    placement_timeout_s: float = Field(default=20.0, gt=0, le=86_400)
    """Seconds that the workers may wait for their resources when the run starts, or starts again; above 0, at
    most 86,400. Ray notices after about 15 seconds that a node is lost."""
    resources: RoleResources = RoleResources()
