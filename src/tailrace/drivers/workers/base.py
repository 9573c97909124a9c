"""Settings of the machine that the worker processes share."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Tag, model_validator
from typing_extensions import override

from tailrace.settings import Settings, default_tag

Role = Literal["trainer", "reference", "engine", "reward"]


class HostSettings(Settings):
    """Hosts of the worker processes."""

    restarts: int = Field(default=0, ge=0, le=1000)
    """How often the run may be resumed by itself from its newest checkpoint, after a worker that is no engine
    has died. 0 to 1000."""
    health_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds after which a trainer, a reference, a judge or a reward worker that is stopped (SIGSTOP) counts
    as dead, and so does the fork server of all; above 0. One that computes for longer does not."""

    def starts(self, role: Role) -> bool:
        """Whether the run starts the workers of a role on the machine on which it is started."""
        return False


class LocalHostSettings(HostSettings):
    """The machine on which the run is started."""

    kind: Literal["local"] = "local"
    """Selects this kind of host."""
    join: tuple[Role, ...] = ()
    """Roles whose workers the run does not start: each is a `tailrace join` on any host. With `listen`."""
    listen: str | None = Field(default=None, pattern=r"^\S+:\d{1,5}$")
    """Address and port of this host at which workers join, for example "10.0.0.7:7777", or "0.0.0.0:7777" for
    all its addresses. They show the token in $TAILRACE_JOIN_TOKEN, or the one that the run prints. There is
    no TLS: a network that others can read is not safe."""

    @override
    def starts(self, role: Role) -> bool:
        return role not in self.join

    @model_validator(mode="after")
    def _check_listen(self) -> "LocalHostSettings":
        if bool(self.join) != bool(self.listen):
            raise ValueError("join and listen are set together")
        return self


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

    kind: Literal["ray"] = "ray"
    """Selects this kind of host."""
    address: str = Field(default="auto", min_length=1)
    """Address of the cluster: `host:port`. "auto": the cluster that runs on this machine."""
    placement_timeout_s: float = Field(default=20.0, gt=0, le=86_400)
    """Seconds that the workers may wait for their resources when the run starts, or starts again; above 0, at
    most 86,400. Ray notices after about 15 seconds that a node is lost."""
    resources: RoleResources = RoleResources()


AnyHostSettings = Annotated[
    Annotated[LocalHostSettings, Tag("local")] | Annotated[RayHostSettings, Tag("ray")], default_tag("local")
]
