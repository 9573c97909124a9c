"""Settings of the machine that the worker processes share."""

from typing import Literal

from pydantic import Field

from tailrace.settings import Settings


class HostSettings(Settings):
    """The machine that the worker processes share."""

    restarts: int = Field(default=0, ge=0, le=1000)
    """How often the run may be resumed by itself from its newest checkpoint, after a worker that is no engine
    has died. 0 to 1000."""


class BrokerSettings(Settings):
    """PipelineRL's broker: the stages of a run on several hosts, joined by Redis streams."""

    url: str | None = None
    """The Redis server, for example "redis://10.0.0.7:6379/0". Without it all workers run on this host."""
    joined: tuple[Literal["trainer", "reference"], ...] = ("trainer",)
    """Stages that the run does not start itself: each is a `tailrace join` on any host. Used with `url`."""
    max_records: int = Field(default=64, ge=1, le=65_536)
    """Unread messages of a stream; who writes then waits. 1 to 65,536."""
