"""Workers on the nodes of a Ray cluster.

Ray places workers and notices that they died. Each worker has an actor of its own in a bundle of resources.
The actor starts the process of the worker, which dials in at the controller, as a worker of this host does.
Each role has a placement group, because a group has one strategy. What a node must import travels in Ray's
runtime environment: this package, and the Python files that the config names by path.

This module imports Ray, so a run that does not use it must not import this module.
"""

import asyncio
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

import tailrace
from tailrace.contracts.trainer import TrainerSettings
from tailrace.devices import Devices
from tailrace.drivers.engine.settings import EngineSettings
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.workers.base import Role
from tailrace.drivers.workers.calls import Process, RemoteWorker, Spawner
from tailrace.drivers.workers.process import LocalProcess, start_process
from tailrace.drivers.workers.trainer import process_names
from tailrace.drivers.workers.wire import Hello, SocketAddress
from tailrace.drivers.workers.worker import Job, Worker
from tailrace.errors import ConfigError, WorkerDied
from tailrace.extras.cluster.settings import RayHostSettings

REACH_S = 5.0
"""Seconds in which the cluster's address must answer."""
ASK_EVERY_S = 0.1
"""Seconds between two questions whether bundles are placed."""


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
    if engine.resources:
        names = [f"engine-{number}" for number in range(engine.num_engines)]
        found.append(Bundles("engine", names, named.engine or engine.resources))
    names = [f"scorer-{number}" for number in range(reward.workers)]
    return [*found, Bundles("reward", names, named.reward or {"CPU": 1.0})]


def _default(threads: int, device: str) -> dict[str, float]:
    return {"CPU": float(threads)} | ({} if device == "cpu" else {"GPU": 1.0})


class NodeActor:
    """Starts the process of one worker on its node. The process ends with the actor, and the actor with the
    node or the run."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None

    async def start(
        self, name: str, kind: type[Worker], job: Job, address: SocketAddress, token: str, run: Path
    ) -> None:
        """Start the process. It dials in at the controller.

        Args:
            run: folder of the run. The log goes to its `logs/` where the node has the folder, else to
                `tailrace/<name of the run>/logs/` of the folder for temporary files.
        """
        folder = run if run.is_dir() else Path(tempfile.gettempdir()) / "tailrace" / run.name
        self._process = await start_process(
            name, kind, job, address, Hello(token), logs=folder / "logs", method="spawn"
        )

    async def ended(self) -> str:
        """Wait until the process has ended. Returns how, and where."""
        assert self._process
        return f"{await self._process.ended()}\n(on {socket.gethostname()})"

    async def abort(self) -> None:
        if self._process is not None:
            self._process.abort()

    async def resume(self) -> None:
        if self._process is not None:
            self._process.resume()


class RayProcess(Process):
    """A process on another node."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name, self._actor = name, actor

    @override
    async def ended(self) -> str:
        """An actor that cannot be reached is lost, also if only its network fails."""
        try:
            words: str = await self._actor.ended.remote()
        except RayError as why:
            return f"{self._name} was lost with its actor or its node: {_essence(why)}"
        self.kill()
        return words

    @override
    def kill(self) -> None:
        """Kill the actor, and the process with it."""
        ray.kill(self._actor)

    @override
    def abort(self) -> None:
        self._actor.abort.remote()

    @override
    def resume(self) -> None:
        self._actor.resume.remote()

    @override
    def log_end(self) -> str:
        return "its node has its log"


class RaySpawner(Spawner):
    """Starts workers on the nodes of a cluster. Made by `open_ray`.

    Args:
        address: of this node, at which workers dial in.
        places: the placement group of each worker, and its bundle's number in it.
    """

    def __init__(self, run: Path, address: str, places: dict[str, tuple[Any, int, Bundles]]) -> None:
        self._run, self._address, self._places = run, address, places

    @override
    async def start(
        self, name: str, kind: type[Worker], job: Job, devices: Devices | None = None
    ) -> RemoteWorker:
        """Ray chooses the node and the GPUs. Raises a WorkerDied if the node was lost."""
        worker, actor = RemoteWorker(name, kind, job), self._create(name)
        address, token = await worker.listen(self._address)
        try:
            await actor.start.remote(name, kind, job, address, token, self._run)
        except BaseException as why:
            worker.expect_no_more()
            ray.kill(actor)
            if isinstance(why, RayError):
                raise WorkerDied(f"{name}: Ray could not start it: {_essence(why)}") from why
            raise
        worker.watch(RayProcess(name, actor))
        return worker

    def _create(self, name: str) -> Any:
        group, number, bundles = self._places[name]
        resources = dict(bundles.resources)
        return (
            ray.remote(NodeActor)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                memory=resources.pop("memory", None),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
            )
            .remote()
        )


@asynccontextmanager
async def open_ray(
    settings: RayHostSettings, bundles: Sequence[Bundles], *, run: Path, files: Sequence[Path]
) -> AsyncIterator[RaySpawner]:
    """Connect to the cluster and reserve the bundles; let go of them with the block. Raises a ConfigError if
    the cluster cannot be reached, or a bundle cannot be placed within `placement_timeout_s`.

    Args:
        run: folder of the run.
        files: Python files that workers import. A worker finds them, and the other Python files of their
            folders, in its working directory.
    """
    with tempfile.TemporaryDirectory() as working_dir:
        for file in files:
            for beside in {file, *file.parent.glob("*.py")}:
                shutil.copy(beside, working_dir)
        _connect(settings.address, Path(working_dir))
        groups: list[Any] = []
        try:
            places = {}
            deadline = time.monotonic() + settings.placement_timeout_s
            for each in bundles:
                groups.append(group := _reserve(each))
                while placement_group_table(group)["state"] != "CREATED":
                    if time.monotonic() > deadline:
                        raise _unplaced(each, group, settings.placement_timeout_s)
                    await asyncio.sleep(ASK_EVERY_S)
                places.update({name: (group, number, each) for number, name in enumerate(each.names)})
            yield RaySpawner(run.absolute(), get_node_ip_address(), places)
        finally:
            for group in groups:
                with suppress(RayError):
                    remove_placement_group(group)
            ray.shutdown()


def _connect(address: str, working_dir: Path) -> None:
    """Join the cluster as a driver. The signal handlers stay the run's."""
    unreachable = "start `ray start` on this machine, or correct the address"
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), REACH_S).close()
        except (OSError, ValueError) as why:
            raise ConfigError("host.address", address, f"no cluster answers ({why})", unreachable) from None
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={
                "py_modules": [str(Path(tailrace.__file__).parent)],
                "working_dir": str(working_dir),
            },
        )
    except (ConnectionError, RuntimeError, ValueError) as why:
        raise ConfigError("host.address", address, _essence(why), unreachable) from why
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _reserve(bundles: Bundles) -> Any:
    return placement_group([dict(bundles.resources) for _ in bundles.names], strategy=STRATEGY[bundles.role])


def _unplaced(bundles: Bundles, group: Any, placement_timeout_s: float) -> ConfigError:
    """Say what a group waits for, and what the cluster has."""
    state = placement_group_table(group)["stats"]["scheduling_state"].lower()
    nodes = "; ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) has {_amounts(node['Resources'])}"
        for node in ray.nodes()
        if node["Alive"]
    )
    free = _amounts(ray.available_resources())
    problem = (
        f"{len(bundles.names)} x {_amounts(bundles.resources)} for {', '.join(bundles.names)} could not be "
        f"placed within {placement_timeout_s:g} s ({state}). The cluster: {nodes}. Free at present: {free}"
    )
    remedy = "ask for less, add nodes, or wait until other jobs of the cluster have ended"
    return ConfigError(f"host.resources.{bundles.role}", dict(bundles.resources), problem, remedy)


def _amounts(resources: Any) -> str:
    """The amounts that a user can ask for, without memory and Ray's own markers."""
    own = ("memory", "object_store_memory", "node:", "bundle_group")
    names = sorted(name for name in resources if not name.startswith(own) and "_group_" not in name)
    return ", ".join(f"{name} {resources[name]:g}" for name in names) or "nothing"


def _essence(error: Exception) -> str:
    """The line of an error that tells most. Ray's errors have many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return next((line for line in lines if "died because" in line), lines[0]).rstrip(".")
