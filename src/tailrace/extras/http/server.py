"""Inference servers: those that a run starts and supervises, and those that it joins.

The process of a server that the run starts has a parent, a worker that ends with it, and it with the worker.
The server's own processes may start others, and may be killed at any time. The worker adopts what they leave
behind. When the controller lets go, or dies, it kills them all. If it is itself killed, a guard kills them.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import httpx
from typing_extensions import override

from tailrace.clock import waiting
from tailrace.devices import Devices
from tailrace.drivers.workers.calls import RemoteWorker, Spawner
from tailrace.drivers.workers.process_tree import adopt_orphans, guard_group, kill_descendants
from tailrace.drivers.workers.wire import STARTED
from tailrace.drivers.workers.worker import Job, Worker, WorkerConnection
from tailrace.errors import WorkerDied
from tailrace.extras.http.vllm import write_plugin

ASK_EVERY_S = 0.25
"""Seconds between two questions to a starting server."""
LOOPBACK = "127.0.0.1"
_OURS = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables that were set for the worker alone (process.py)."""


class ServerJob(Job):
    """Run an inference server."""

    health_key = "engine.health_timeout_s"
    command: tuple[str, ...]
    """Command of the server. On another host the loopback address in it is that host's own."""
    env: dict[str, str] = {}
    """Environment variables beside those of the controller."""
    plugins: Path | None = None
    """A folder that is written before the server starts, and removed with it: there this package is a plug-in
    of vLLM."""
    needs: dict[str, Path] = {}
    """Folders that it needs, by the name of their setting, as in `folders`."""

    @override
    def folders(self) -> Mapping[str, Path]:
        return self.needs

    @override
    def at(self, address: str) -> Self:
        """The server listens on that address."""
        command = tuple(address if word == LOOPBACK else word for word in self.command)
        return self.model_copy(update={"command": command})


class ServerWorker(Worker):
    """The parent of an inference server. It has no methods: the server answers over HTTP."""

    job_type = ServerJob

    @override
    @classmethod
    def run(cls, job: ServerJob, connection: WorkerConnection) -> None:
        adopt_orphans()
        guard_group()
        if job.plugins:
            write_plugin(job.plugins)

        def clean_up() -> None:
            kill_descendants()
            if job.plugins:
                shutil.rmtree(job.plugins, ignore_errors=True)

        inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
        server = subprocess.Popen(job.command, env={**inherited, **job.env})
        connection.end_process_with_controller(clean_up=clean_up)

        def watch() -> None:
            code = server.wait()
            clean_up()
            if code < 0:  # end in the same way
                os.kill(os.getpid(), -code)
            os._exit(code)

        threading.Thread(target=watch, name="end with server", daemon=True).start()
        connection.answer(STARTED, None)
        connection.receive(wait=True)  # nothing is ever asked: the controller lets go
        clean_up()
        os._exit(0)


class ManagedServer:
    """A server that this run has started (extras/http/engine.py: Server).

    Args:
        worker: its parent, which is connected.
        port: where it will answer, on the address of its host.
        start_timeout_s: seconds that it may take.
    """

    def __init__(self, worker: RemoteWorker, port: int, start_timeout_s: float) -> None:
        self.url = f"http://{worker.address}:{port}"
        self._worker, self._start_timeout_s = worker, start_timeout_s

    @classmethod
    async def start(
        cls,
        name: str,
        job: ServerJob,
        spawner: Spawner,
        port: int,
        start_timeout_s: float,
        devices: Devices | None = None,
    ) -> Self:
        """Start a server."""
        worker = await spawner.start(name, ServerWorker, job, devices)
        try:
            await worker.connected()
        except BaseException:
            await worker.close()
            raise
        return cls(worker, port, start_timeout_s)

    async def ready(self) -> None:
        """Wait until it answers.

        Raises:
            ConfigError: its host lacks a folder.
            WorkerDied: it ended, with the end of its log, or did not answer in time.
        """
        await self._worker.ready()
        ended = asyncio.ensure_future(self._worker.exit_reason())
        try:
            with waiting(f"{self._worker.name} to start"):
                async with (
                    asyncio.timeout(self._start_timeout_s),
                    httpx.AsyncClient(trust_env=False) as client,
                ):
                    while not ended.done() and not await _is_well(client, self.url):
                        await asyncio.wait([ended], timeout=ASK_EVERY_S)
        except TimeoutError:
            limit = f"{self._start_timeout_s:g} s (engine.start_timeout_s)"
            problem = f"{self._worker.name} did not answer within {limit}"
            raise WorkerDied(f"{problem}; {self._worker.process.log_end()}") from None
        finally:
            ended.cancel()
        if ended.done() and not ended.cancelled():
            raise WorkerDied(ended.result())

    async def died(self) -> str:
        """Wait until it has ended. Returns its exit cause and the end of its log."""
        return await self._worker.exit_reason()

    async def close(self) -> None:
        """Kill it, with all processes that it has started."""
        await self._worker.close()


class JoinedServer:
    """A server that this run has not started (extras/http/engine.py: Server)."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ready(self) -> None:
        """Return at once; `HttpEngine.ready` checks the server."""

    async def died(self) -> str:
        """Never returns: only a health check can tell."""
        return str(await asyncio.get_running_loop().create_future())

    async def close(self) -> None:
        """Leave it as it is."""


async def _is_well(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """A port that is free on this host now. A server on another host that finds it taken ends, and is started
    again with another one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
