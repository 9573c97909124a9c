"""The hosts of the workers: this one, others from which workers join, or the nodes of a Ray cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tailrace.drivers.engine.settings import EngineSettings
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.weights.settings import WeightsSettings
from tailrace.drivers.workers.base import AnyHostSettings
from tailrace.drivers.workers.calls import Spawner
from tailrace.errors import ConfigError
from tailrace.kinds import kind_of


class HostKind:
    """Where workers run: this one is "local". The settings are always those of this kind."""

    def check(self, host: Any, engine: EngineSettings) -> None:
        """Check the settings before anything starts. Does not look for a cluster. Raises a ConfigError."""

    def check_placement(self, placement: Any) -> None:
        """Check the PlacementSettings of a run before anything starts. Raises a ConfigError."""

    @asynccontextmanager
    async def open(self, host: Any, config: Any, folder: Path) -> AsyncIterator[Spawner]:
        """Open what starts the workers of a run of a RunConfig; they must have ended before the block ends.
        Raises a ConfigError if the cluster cannot be reached, or a worker cannot be placed."""
        from tailrace.drivers.workers.process import LocalSpawner

        yield LocalSpawner(folder / "logs")

    def rewards_there(self, reward: RewardSettings) -> RewardSettings:
        """Return the settings as reward workers need them."""
        return reward


def host_kind(host: AnyHostSettings) -> HostKind:
    """Return the kind of a host."""
    joins = bool(getattr(host, "join", ()))
    kind: HostKind = kind_of("hosts", "join", "host.join") if joins else kind_of("host", host.kind)
    return kind


def check_host(host: AnyHostSettings, *, engine: EngineSettings, weights: WeightsSettings) -> None:
    """Check that the other settings can be honoured on other hosts, as `HostKind.check`."""
    host_kind(host).check(host, engine)
    if weights.one_host and not (host.starts("trainer") and host.starts("engine")):
        key = f"host.kind = {host.kind!r}" if host.gives_devices else "host.join"
        problem = f"engines and trainer may be on different hosts ({key})"
        remedy = 'write "process_group" or "filesystem"'
        raise ConfigError("weights.transport", weights.transport, problem, remedy)
    if weights.needs_address and host.starts("trainer") and not host.starts("engine"):
        problem = "engines of other hosts do not reach the trainer there (host.join)"
        raise ConfigError("weights.host", "127.0.0.1", problem, "write the address of this host")
