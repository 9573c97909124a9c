"""The hosts of the workers: this one, others from which workers join, or the nodes of a Ray cluster."""

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.engine.settings import EngineSettings, NativeEngineSettings
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.weights.settings import ProcessGroupSettings, SharedMemorySettings, WeightsSettings
from tailrace.drivers.workers.base import AnyHostSettings, LocalHostSettings, RayHostSettings
from tailrace.drivers.workers.calls import Spawner
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.errors import ConfigError
from tailrace.extras.cluster.join import open_joining
from tailrace.importing import install


def check_host(host: AnyHostSettings, *, engine: EngineSettings, weights: WeightsSettings) -> None:
    """Check that the other settings can be honoured on other hosts. Does not look for the cluster. Raises a
    ConfigError if they cannot, or Ray is not installed."""
    if isinstance(host, RayHostSettings) and importlib.util.find_spec("ray") is None:
        raise ConfigError("host.kind", "ray", "Ray is not installed", install("ray"))
    joins = isinstance(host, LocalHostSettings) and not host.starts("engine")
    if joins and not isinstance(engine, NativeEngineSettings):
        remedy = "write engine.urls for servers of other hosts"
        raise ConfigError("host.join", "engine", f"no engine of the kind {engine.kind!r} can join", remedy)
    if isinstance(weights, SharedMemorySettings) and not (host.starts("trainer") and host.starts("engine")):
        key = "host.join" if isinstance(host, LocalHostSettings) else "host.kind = 'ray'"
        problem = f"engines and trainer may be on different hosts ({key})"
        remedy = 'write "process_group" or "filesystem"'
        raise ConfigError("weights.transport", "shared_memory", problem, remedy)
    is_default = isinstance(weights, ProcessGroupSettings) and "host" not in weights.model_fields_set
    if joins and is_default and host.starts("trainer"):
        problem = "engines of other hosts do not reach the trainer there (host.join)"
        raise ConfigError("weights.host", "127.0.0.1", problem, "write the address of this host")


@asynccontextmanager
async def open_spawner(
    host: AnyHostSettings,
    *,
    engine: EngineSettings,
    trainer: TrainerSettings,
    reward: RewardSettings,
    needs_reference: bool,
    folder: Path,
) -> AsyncIterator[Spawner]:
    """Open what starts the workers of a run; workers must have ended before the block ends. Raises a
    ConfigError if the cluster cannot be reached, or a worker cannot be placed.

    Args:
        folder: folder of the run.
    """
    if isinstance(host, LocalHostSettings):
        async with open_joining(host, LocalSpawner(folder / "logs")) as spawner:
            yield spawner
        return
    from tailrace.extras.cluster.ray import open_ray, plan_bundles  # Ray is imported by runs that use it

    bundles = plan_bundles(
        host, engine=engine, trainer=trainer, reward=reward, needs_reference=needs_reference
    )

    functions = [reward.function or "", *(each.function for each in reward.functions)]
    files = [file for function in functions if (file := _file_of(function))]
    async with open_ray(host, bundles, run=folder, files=files) as placed:
        yield placed


def where_workers_run(host: AnyHostSettings, reward: RewardSettings) -> RewardSettings:
    """Return the settings for reward workers: a file is in their working directory on another host."""
    if not isinstance(host, RayHostSettings):
        return reward
    functions = [each.model_copy(update={"function": _there(each.function)}) for each in reward.functions]
    function = reward.function and _there(reward.function)
    return reward.model_copy(update={"function": function, "functions": tuple(functions)})


def _there(function: str) -> str:
    """Return how another host names a function."""
    file = _file_of(function)
    return f"{file.name}:{function.rpartition(':')[2]}" if file else function


def _file_of(function: str) -> Path | None:
    """Return the file in which a function is, if its name names one."""
    place = function.rpartition(":")[0]
    return Path(place) if place.endswith((".py", ".pkl")) else None
