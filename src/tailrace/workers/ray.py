"""Workers on the nodes of a Ray cluster.

    controller -- RayWorker -- tell(frames), hear() --> NodeActor (node.py) -- socket --> worker process

Each worker has an actor of its own in a bundle of resources. Each role has a placement group, because a group
has one strategy. Ray carries the messages of messages.py. Weights take their own transport (weights/) and not
the object store. What a node must import travels in Ray's runtime environment: this package, and the Python
files that the config names by path.

This module imports Ray, so a run that does not use it must not import this module.
"""

import asyncio
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import tailrace
from tailrace.devices import Devices
from tailrace.errors import ConfigError, WorkerDied
from tailrace.workers.base import RayHostSettings
from tailrace.workers.bundles import STRATEGY, Bundles
from tailrace.workers.conversation import Conversation
from tailrace.workers.messages import Job, TrainerJob
from tailrace.workers.node import NodeActor
from tailrace.workers.process import CLOSE_S

REACH_S = 5.0
"""Seconds in which the cluster's address must answer."""
ASK_EVERY_S = 0.1
"""Seconds between two questions whether bundles are placed."""
_encode = msgspec.msgpack.encode


class RayWorker(Conversation):
    """The controller's side of a worker on another node."""

    def __init__(self, name: str, actor: Any, decoder: msgspec.msgpack.Decoder[Any], address: str) -> None:
        super().__init__(name)
        self.address = address
        self._actor, self._decoder = actor, decoder
        self._unsent: list[bytes] = []
        self._something = asyncio.Event()
        self._tasks = [asyncio.create_task(self._hear()), asyncio.create_task(self._tell())]

    def log_end(self) -> str:
        """As Conversation.log_end. The end of the log is part of the last words."""
        return "its node has its log"

    def kill_group(self, leader: int) -> None:
        """As Conversation.kill_group."""
        self._actor.kill_group.remote(leader)

    def abort(self, fault: str) -> None:
        """As Conversation.abort."""
        self._actor.abort.remote(fault)

    def kill(self) -> None:
        """Kill the actor, and the worker with it."""
        ray.kill(self._actor)
        self._ended(f"{self.name} was killed by its controller")

    async def close(self) -> None:
        """Let the worker end, and kill it if it does not within CLOSE_S."""
        if not self.has_ended:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(2 * CLOSE_S):
                    await self._actor.close.remote()
        self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _write(self, message: msgspec.Struct) -> None:
        self._unsent.append(_encode(message))
        self._something.set()

    async def _tell(self) -> None:
        """Send what there is, in one call at a time: Ray keeps no order between calls of coroutines."""
        with self._ended_by_ray():
            while not self.has_ended:
                await self._something.wait()
                self._something.clear()
                frames, self._unsent = self._unsent, []
                await self._actor.tell.remote(frames)

    async def _hear(self) -> None:
        with self._ended_by_ray():
            while not self.has_ended:
                frames, last_words = await self._actor.hear.remote()
                try:
                    for frame in frames:
                        self.on_message(self._decoder.decode(frame))
                except Exception as defect:  # no request may hang
                    self._cause = defect
                    last_words = f"{self.name}: the controller could not handle its message: {defect!r}"
                    ray.kill(self._actor)
                if last_words is not None:
                    self._ended(last_words)

    @contextmanager
    def _ended_by_ray(self) -> Iterator[None]:
        """An actor that cannot be reached counts as lost, also if only its network fails."""
        try:
            yield
        except RayError as why:
            self._ended(f"{self.name} was lost with its actor or its node: {_essence(why)}")


class RaySpawner:
    """Starts workers on the nodes of a cluster. Made by `open_ray`."""

    def __init__(self, run: Path, checkpoints: bool, places: dict[str, tuple[Any, int, Bundles]]) -> None:
        self._run, self._checkpoints, self._places = run, checkpoints, places
        """The placement group of each worker, and its bundle's number in it."""

    async def spawn(
        self,
        name: str,
        module: str,
        job: Job,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        devices: Devices | None = None,
    ) -> Conversation:
        """As Spawner.spawn. Ray chooses the node and the GPUs.

        Raises:
            ConfigError: the node lacks a folder that the job needs.
            WorkerDied: the node was lost.
        """
        actor = self._create(name)
        try:
            node, address = await actor.node.remote()
            await self._check_folders(actor, node, job)
            await actor.start.remote(name, module, job.at(address), self._run)
        except RayError as why:
            ray.kill(actor)
            raise WorkerDied(f"{name}: Ray could not start it: {_essence(why)}") from why
        except BaseException:
            ray.kill(actor)
            raise
        return RayWorker(name, actor, decoder, address)

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

    async def _check_folders(self, actor: Any, node: str, job: Job) -> None:
        folders = dict(job.folders())
        if self._checkpoints and isinstance(job, TrainerJob):
            folders["--output-dir"] = self._run
        missing = await actor.missing.remote(list(folders.values()))
        for key, folder in folders.items():
            if folder in missing:
                remedy = "put it where every node has it under this path, for example on a shared file system"
                raise ConfigError(key, str(folder), f"node {node} has no such folder", remedy)


@asynccontextmanager
async def open_ray(
    settings: RayHostSettings,
    bundles: Sequence[Bundles],
    *,
    run: Path,
    checkpoints: bool,
    files: Sequence[Path],
) -> AsyncIterator[RaySpawner]:
    """Connect to the cluster and reserve the bundles; let go of them with the block.

    Args:
        run: folder of the run.
        checkpoints: the trainer writes checkpoints into that folder, which the controller reads.
        files: Python files that workers import. A worker finds them, and the other Python files of their
            folders, in its working directory.

    Raises:
        ConfigError: the cluster cannot be reached, or a bundle cannot be placed within `placement_timeout_s`.
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
            yield RaySpawner(run.absolute(), checkpoints, places)
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
    return placement_group(
        [dict(bundles.resources) for _ in bundles.names],
        strategy=STRATEGY[bundles.role],
    )


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
