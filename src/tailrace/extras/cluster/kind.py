"""The host "ray". Imports no Ray: that it is not installed is a ConfigError."""

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from typing_extensions import override

from tailrace.config import RunConfig
from tailrace.drivers.engine.settings import EngineSettings
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.workers.calls import Spawner
from tailrace.drivers.workers.hosts import HostKind
from tailrace.errors import ConfigError
from tailrace.extras.cluster.settings import RayHostSettings
from tailrace.importing import install
from tailrace.rollout.placement import PlacementSettings


class RayHost(HostKind):
    """The nodes of a Ray cluster."""

    settings = RayHostSettings

    @override
    def check(self, host: RayHostSettings, engine: EngineSettings) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("host.kind", "ray", "Ray is not installed", install("ray"))

    @override
    def check_placement(self, placement: PlacementSettings) -> None:
        for name, listed in (("engines", placement.engines), ("trainer", placement.trainer)):
            if listed:
                problem = "Ray chooses nodes and devices (host.kind = 'ray')"
                remedy = "remove it, and name amounts in [host.resources]"
                raise ConfigError(f"placement.{name}", listed, problem, remedy)
        if largest := placement.max_tensor_parallel_size:
            problem = "Ray gives each server its devices once, and two servers cannot be joined"
            raise ConfigError("placement.max_tensor_parallel_size", largest, problem, "remove it")

    @override
    @asynccontextmanager
    async def open(self, host: RayHostSettings, config: RunConfig, folder: Path) -> AsyncIterator[Spawner]:
        from tailrace.extras.cluster.ray import open_ray, plan_bundles

        reward, needs_reference = config.reward, config.algorithm.kl_coef > 0
        bundles = plan_bundles(host, config.engine, config.trainer, reward, needs_reference)
        functions = [reward.function or "", *(each.function for each in reward.functions)]
        files = [file for function in functions if (file := _file_of(function))]
        async with open_ray(host, bundles, run=folder, files=files) as placed:
            yield placed

    @override
    def rewards_there(self, reward: RewardSettings) -> RewardSettings:
        """Return the settings for reward workers: a file is in their working directory on another host."""
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
