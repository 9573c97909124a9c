"""Inference servers: those that a run starts and supervises, and those that it joins."""

import asyncio
import socket

import httpx
import msgspec

from tailrace.clock import waiting
from tailrace.devices import Devices
from tailrace.errors import WorkerDied
from tailrace.workers.conversation import Conversation
from tailrace.workers.server_messages import FromServer, ServerJob
from tailrace.workers.spawner import Spawner

ASK_EVERY_S = 0.25
"""Seconds between two questions to a starting server."""


class ManagedServer:
    """A server that this run has started (engine/http.py: Server)."""

    def __init__(self, process: Conversation, url: str, start_timeout_s: float) -> None:
        self.url = url
        self._process, self._start_timeout_s = process, start_timeout_s

    @classmethod
    async def spawn(
        cls,
        name: str,
        job: ServerJob,
        spawner: Spawner,
        *,
        port: int,
        start_timeout_s: float,
        devices: Devices | None = None,
    ) -> "ManagedServer":
        """Start a server in a process group of its own.

        Args:
            port: where it will answer, on the address of its host.
            start_timeout_s: seconds that it may take.
        """
        decoder = msgspec.msgpack.Decoder(FromServer)
        module = "tailrace.workers.server_child"
        process = await spawner.spawn(name, module, job, decoder, devices=devices)
        return cls(process, f"http://{process.address}:{port}", start_timeout_s)

    async def ready(self) -> None:
        """Wait until it answers.

        Raises:
            WorkerDied: it ended, with the end of its log, or did not answer in time.
        """
        ended = asyncio.ensure_future(self._process.last_words())
        try:
            with waiting(f"{self._process.name} to start"):
                async with (
                    asyncio.timeout(self._start_timeout_s),
                    httpx.AsyncClient(trust_env=False) as client,
                ):
                    while not ended.done() and not await _is_well(client, self.url):
                        await asyncio.wait([ended], timeout=ASK_EVERY_S)
        except TimeoutError:
            words = self._process.log_end()
            limit = f"{self._start_timeout_s:g} s (engine.start_timeout_s)"
            raise WorkerDied(f"{self._process.name} did not answer within {limit}; {words}") from None
        finally:
            ended.cancel()
        if ended.done() and not ended.cancelled():
            raise WorkerDied(ended.result())

    async def died(self) -> str:
        """Wait until it has ended. Returns its exit cause and the end of its log."""
        return await self._process.last_words()

    async def close(self) -> None:
        """Kill it, with all processes that it has started."""
        await self._process.close()


class JoinedServer:
    """A server that this run has not started (engine/http.py: Server)."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ready(self) -> None:
        """Nothing to wait for: whether it answers is found out by asking."""

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
