"""The hosts of the workers: this one, others from which workers join, or the nodes of a Ray cluster."""

import importlib.util
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tailrace.devices import Devices
from tailrace.engine.settings import EngineSettings, NativeEngineSettings
from tailrace.errors import ConfigError
from tailrace.reward.base import RewardSettings
from tailrace.trainer.base import TrainerSettings
from tailrace.weights.base import ProcessGroupSettings, SharedMemorySettings, WeightsSettings
from tailrace.workers.base import AnyHostSettings, LocalHostSettings, RayHostSettings, Role
from tailrace.workers.calls import Job, RemoteWorker, Worker
from tailrace.workers.join import open_joining
from tailrace.workers.process import LocalSpawner
from tailrace.workers.trainer import process_names

Strategy = Literal["PACK", "SPREAD"]

STRATEGY: Mapping[Role, Strategy] = {
    "trainer": "PACK",
    "reference": "PACK",
    "engine": "SPREAD",
    "reward": "SPREAD",
}
"""Ranks exchange gradients, so they share nodes. A lost node takes as few engines with it as possible."""


@dataclass(frozen=True, slots=True)
class Bundles:
    """The workers of one role.

    Args:
        names: one worker each.
        resources: of each worker, by name.
    """

    role: Role
    names: Sequence[str]
    resources: Mapping[str, float]


def plan_bundles(
    host: RayHostSettings,
    *,
    engine: EngineSettings,
    trainer: TrainerSettings,
    reward: RewardSettings,
    needs_reference: bool,
) -> list[Bundles]:
    """Return the bundles of a run, in the order in which they are placed."""
    named, of_trainer = host.resources, _default(trainer.threads, trainer.device)
    found = [Bundles("trainer", process_names(trainer), named.trainer or of_trainer)]
    if needs_reference and not trainer.lora:  # otherwise the trainer is the reference
        found.append(Bundles("reference", ["reference"], named.reference or of_trainer))
    if isinstance(engine, NativeEngineSettings):
        names = [f"engine-{number}" for number in range(engine.num_engines)]
        resources = named.engine or _default(engine.threads, engine.device)
        found.append(Bundles("engine", names, resources))
    elif not engine.urls:
        names = [f"engine-{number}" for number in range(engine.num_engines)]
        gpus = {"CPU": 1.0, "GPU": float(engine.tensor_parallel_size)}
        found.append(Bundles("engine", names, named.engine or gpus))
    names = [f"scorer-{number}" for number in range(reward.workers)]
    return [*found, Bundles("reward", names, named.reward or {"CPU": 1.0})]


def _default(threads: int, device: str) -> dict[str, float]:
    return {"CPU": float(threads)} | ({} if device == "cpu" else {"GPU": 1.0})


class Spawner(Protocol):
    """Starts workers, on this host or on others."""

    async def start(
        self, name: str, kind: type[Worker], job: Job, devices: Devices | None = None
    ) -> RemoteWorker:
        """Start a worker with a job.

        Args:
            name: of the worker, for messages and its log.
            devices: what the worker may use of its machine; None: everything.
        """


def check_host(host: AnyHostSettings, *, engine: EngineSettings, weights: WeightsSettings) -> None:
    """Check that the other settings can be honoured on other hosts. Does not look for the cluster.

    Raises:
        ConfigError: they cannot, or Ray is not installed.
    """
    if isinstance(host, RayHostSettings) and importlib.util.find_spec("ray") is None:
        raise ConfigError("host.kind", "ray", "Ray is not installed", "pip install 'tailrace[ray]'")
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
    """Open what starts the workers of a run; workers must have ended before the block ends.

    Args:
        folder: folder of the run.

    Raises:
        ConfigError: the cluster cannot be reached, or a worker cannot be placed.
    """
    if isinstance(host, LocalHostSettings):
        async with open_joining(host, LocalSpawner(folder / "logs")) as spawner:
            yield spawner
        return
    from tailrace.workers.ray import open_ray  # Ray is imported by runs that use it

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
