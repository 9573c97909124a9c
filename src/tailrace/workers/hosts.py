"""The hosts of the workers: this one, or the nodes of a Ray cluster."""

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tailrace.engine.settings import EngineSettings
from tailrace.errors import ConfigError
from tailrace.reward.base import RewardSettings
from tailrace.trainer.base import TrainerSettings
from tailrace.weights.base import SharedMemorySettings, WeightsSettings
from tailrace.workers.base import BrokerSettings, HostSettings, RayHostSettings
from tailrace.workers.bundles import plan_bundles
from tailrace.workers.spawner import LocalSpawner, Spawner


def check_host(host: HostSettings, *, weights: WeightsSettings, broker: BrokerSettings) -> None:
    """Check that the other settings can be honoured on other hosts. Does not look for the cluster.

    Raises:
        ConfigError: they cannot, or Ray is not installed.
    """
    if not isinstance(host, RayHostSettings):
        return
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("host.kind", "ray", "Ray is not installed", "pip install 'tailrace[ray]'")
    if isinstance(weights, SharedMemorySettings):
        problem = "engines and trainer may be on different nodes (host.kind = 'ray')"
        remedy = 'write "process_group" or "filesystem"'
        raise ConfigError("weights.transport", "shared_memory", problem, remedy)
    if broker.url:
        problem = "Ray places every stage (host.kind = 'ray')"
        raise ConfigError("broker.url", broker.url, problem, "remove the section [broker]")


@asynccontextmanager
async def open_spawner(
    host: HostSettings,
    *,
    engine: EngineSettings,
    trainer: TrainerSettings,
    reward: RewardSettings,
    needs_reference: bool,
    folder: Path,
    checkpoints: bool,
) -> AsyncIterator[Spawner]:
    """Open what starts the workers of a run; workers must have ended before the block ends.

    Args:
        folder: folder of the run.
        checkpoints: the run writes checkpoints into it.

    Raises:
        ConfigError: the cluster cannot be reached, or a worker cannot be placed.
    """
    if not isinstance(host, RayHostSettings):
        yield LocalSpawner(folder / "logs")
        return
    from tailrace.workers.ray import open_ray  # Ray is imported by runs that use it

    bundles = plan_bundles(
        host, engine=engine, trainer=trainer, reward=reward, needs_reference=needs_reference
    )
    functions = [reward.function or "", *(each.function for each in reward.functions)]
    files = [file for function in functions if (file := _file_of(function))]
    async with open_ray(host, bundles, run=folder, checkpoints=checkpoints, files=files) as spawner:
        yield spawner


def where_workers_run(host: HostSettings, reward: RewardSettings) -> RewardSettings:
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
