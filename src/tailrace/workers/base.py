"""Settings of the machine that the worker processes share."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tailrace.errors import ConfigError
from tailrace.settings import Settings


class HostSettings(Settings):
    """Where the worker processes run."""

    pin: bool = False
    """Pin each engine to a CPU of its own, and the trainer to another one. The controller and the reward
    workers share the engines' CPUs. true or false; for engines and trainers of one thread."""
    restarts: int = Field(default=0, ge=0, le=1000)
    """How often the run may be resumed by itself from its newest checkpoint, after a worker that is no engine
    has died. 0 to 1000."""


class LocalHostSettings(HostSettings):
    """The machine on which the run is started."""

    kind: Literal["local"] = "local"
    """Selects this kind of host."""


Resources = Annotated[Mapping[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]
"""Amounts of Ray's resources by name: "CPU", "GPU", or a name that `ray start --resources` gave a node."""


class RoleResources(Settings):
    """What one worker of each role takes of its node. The amounts of a role without an entry are CPU: its
    threads, and GPU: 1 if its device is CUDA."""

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

    kind: Literal["ray"] = "ray"
    """Selects this kind of host."""
    address: str = Field(default="auto", min_length=1)
    """Address of the cluster: `host:port`. "auto": the cluster that runs on this machine."""
    place_s: float = Field(default=20.0, gt=0, le=86_400)
    """Seconds that the workers may wait for their resources when the run starts, or starts again; above 0, at
    most 86,400. Ray notices after about 15 seconds that a node is lost."""
    resources: RoleResources = RoleResources()


def _kind_of(value: Any) -> str:
    return str(value.get("kind", "local") if isinstance(value, dict) else getattr(value, "kind", "local"))


AnyHostSettings = Annotated[
    Annotated[LocalHostSettings, Tag("local")] | Annotated[RayHostSettings, Tag("ray")],
    Discriminator(_kind_of),
]


class BrokerSettings(Settings):
    """PipelineRL's broker: the stages of a run on several hosts, joined by Redis streams."""

    url: str | None = None
    """The Redis server, for example "redis://10.0.0.7:6379/0". Without it all workers run on this host."""
    joined: tuple[Literal["trainer", "reference"], ...] = ("trainer",)
    """Stages that the run does not start itself: each is a `tailrace join` on any host. Used with `url`."""
    max_records: int = Field(default=64, ge=1, le=65_536)
    """Unread messages of a stream; who writes then waits. 1 to 65,536."""


def plan_pins(settings: HostSettings, num_engines: int) -> list[int]:
    """Assign CPUs to workers.

    Returns:
        A CPU for each engine, then one for the trainer; empty without pinning.

    Raises:
        ConfigError: the host has fewer CPUs than that, or the system cannot pin.
    """
    if not settings.pin:
        return []
    cpus = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if len(cpus) <= num_engines:
        problem = f"{num_engines} engines and a trainer need as many CPUs to be pinned to, not {len(cpus)}"
        raise ConfigError("host.pin", True, problem, "switch it off, or start fewer engines")
    return cpus[: num_engines + 1]


@contextmanager
def trainer_cpu_reserved(pins: list[int]) -> Iterator[None]:
    """Keep this process, and the processes it starts without a pin, off the trainer's CPU inside the block.

    Args:
        pins: of `plan_pins`.
    """
    if not pins:
        yield
        return
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus - {pins[-1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)
