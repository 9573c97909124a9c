"""Settings of the machine that the worker processes share."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from tailrace.kinds import OneOf
from tailrace.settings import Settings

Role = Literal["trainer", "reference", "engine", "reward"]


class HostSettings(Settings):
    """Hosts of the worker processes."""

    gives_devices: ClassVar[bool] = False
    """Whether a cluster chooses the node and the devices of each worker."""
    restarts: int = Field(default=0, ge=0, le=1000)
    """How often the run may be resumed by itself from its newest checkpoint, after a worker that is no engine
    has died. 0 to 1000."""
    health_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds after which a trainer, a reference, a judge or a reward worker that is stopped (SIGSTOP) counts
    as dead, and so does the fork server of all; above 0. One that computes for longer does not."""

    kind: str
    """Selects a kind of host."""

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


AnyHostSettings = Annotated[HostSettings, OneOf("host", LocalHostSettings, default="local")]
