"""Workers of other hosts: `tailrace join` on those, and the port of the run at which they dial in.

A worker that joins shows the token of the run and its role. The controller gives it the first job of that
role that has no worker; one too many waits until another dies. If it dies, it is as dead as any other worker:
the run ends with it, but for an engine, in whose place another one may join.
"""

import asyncio
import hmac
import os
import secrets
import signal
import socket
import sys
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

from typing_extensions import override

from tailrace.devices import Devices
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.engine.settings import EngineSettings
from tailrace.drivers.workers.base import LocalHostSettings, Role
from tailrace.drivers.workers.calls import Channel, Process, RemoteWorker, Spawner
from tailrace.drivers.workers.hosts import HostKind
from tailrace.drivers.workers.process import LocalSpawner, start_process
from tailrace.drivers.workers.wire import Hello
from tailrace.drivers.workers.worker import Job, Worker
from tailrace.errors import ConfigError, WorkerDied, say
from tailrace.importing import check_training

TOKEN_VARIABLE = "TAILRACE_JOIN_TOKEN"
GOES_ON = "{}: works until the run lets go, which may be saving; Ctrl-C then ends it at once"
"""A cluster that takes its nodes back sends a signal to all processes of a job."""
REACH_S = 10.0
"""Seconds in which the address of a run must answer."""
_KINDS: dict[Role, tuple[str, str]] = {
    "trainer": ("trainer", "TrainerWorker"),
    "reference": ("reference", "ReferenceWorker"),
    "engine": ("engine", "EngineWorker"),
    "reward": ("reward_process", "RewardWorker"),
}


def join(role: Role, address: str, /, *, token: str | None = None) -> None:
    """Do the work of a role for a run on another host, until the run lets go.

    Args:
        address: HOST:PORT, as host.listen of the run.
        token: The token that the run prints. Without it: $TAILRACE_JOIN_TOKEN.

    Raises:
        ConfigError: nothing answers at the address, there is no token, or as `check_training`.
        WorkerDied: the process of the worker ended before the run let go.
    """
    check_training("ROLE", role)
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, ValueError) as why:
        problem = f"no run listens there ({why})"
        raise ConfigError("HOST:PORT", address, problem, "start the run, or write its host.listen") from None
    token = token or os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError("--token", "", "there is none", f"write it, or set ${TOKEN_VARIABLE}")
    with signals_received(lambda number: say(GOES_ON.format(signal.Signals(number).name))):
        asyncio.run(_work(role, (host, int(port)), token))


async def _work(role: Role, address: tuple[str, int], token: str) -> None:
    module, name = _KINDS[role]
    kind = getattr(import_module(f"tailrace.drivers.workers.{module}"), name)
    job = Job(health_timeout_s=LocalHostSettings().health_timeout_s)  # the true one comes from the controller
    process = await start_process(role, kind, job, address, Hello(token, role), logs=None, method="spawn")
    reason = await process.ended()
    if process.exit_code:
        raise WorkerDied(reason)


class JoinedProcess(Process):
    """A process on another host. Its connection is all that is known of it."""

    def __init__(self, worker: RemoteWorker) -> None:
        self._worker = worker

    @override
    async def ended(self) -> str:
        await self._worker.disconnected()
        return f"{self._worker.name} (joined from {self._worker.address}) has ended; {self.log_end()}"

    @override
    def kill(self) -> None:
        self._worker.disconnect()

    @override
    def abort(self) -> None:
        self.kill()

    @override
    def resume(self) -> None:
        pass  # its own host ends a worker that is stopped

    @override
    def log_end(self) -> str:
        return "its host has its log"


class JoinSpawner(Spawner):
    """Starts workers of this host, and waits for those of some roles. Made by `open_joining`."""

    def __init__(self, settings: LocalHostSettings, local: LocalSpawner, token: str) -> None:
        self._settings, self._local, self._token = settings, local, token
        self._expected: defaultdict[str, deque[RemoteWorker]] = defaultdict(deque)
        """Workers that have not joined yet, by role."""
        self._waiting: defaultdict[str, deque[Channel]] = defaultdict(deque)
        """Connections that have no worker yet, by role."""

    @override
    async def start(
        self, name: str, kind: type[Worker], job: Job, devices: Devices | None = None
    ) -> RemoteWorker:
        if kind.role not in self._settings.join:
            return await self._local.start(name, kind, job, devices)
        worker = RemoteWorker(name, kind, job)
        worker.awaited = f"{name} to join: tailrace join {kind.role} {self._settings.listen}"
        print(f"tailrace: waiting for {worker.awaited}", file=sys.stderr)
        worker.watch(JoinedProcess(worker))
        self._expected[kind.role].append(worker)
        self._match(kind.role)
        return worker

    def on_hello(self, channel: Channel, hello: Hello) -> None:
        """Take a connection whose first frame has arrived."""
        if not hmac.compare_digest(hello.token, self._token) or hello.role not in self._settings.join:
            channel.refuse()
            return
        self._waiting[hello.role].append(channel)
        self._match(hello.role)

    def _match(self, role: str) -> None:
        """Give each waiting connection the oldest job of its role that has no worker."""
        expected, waiting = self._expected[role], self._waiting[role]
        while expected and waiting:
            if not expected[0].is_awaited:
                expected.popleft()
            elif waiting[0].transport.is_closing():
                waiting.popleft()
            else:
                waiting.popleft().attach(expected.popleft())


class JoinHost(HostKind):
    """This host, and others from which workers join."""

    @override
    def check(self, host: LocalHostSettings, engine: EngineSettings) -> None:
        if not host.starts("engine") and not engine.can_join:
            remedy = "write engine.urls for servers of other hosts"
            raise ConfigError(
                "host.join", "engine", f"no engine of the kind {engine.kind!r} can join", remedy
            )

    @override
    @asynccontextmanager
    async def open(self, host: LocalHostSettings, config: object, folder: Path) -> AsyncIterator[Spawner]:
        async with open_joining(host, LocalSpawner(folder / "logs")) as spawner:
            yield spawner


@asynccontextmanager
async def open_joining(settings: LocalHostSettings, local: LocalSpawner) -> AsyncIterator[Spawner]:
    """Listen for workers of the roles that join. Raises a ConfigError if this host cannot
    listen on the address."""
    assert settings.listen
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        token = secrets.token_urlsafe(32)
        print(f"tailrace: token of workers that join: {token}", file=sys.stderr)
    spawner = JoinSpawner(settings, local, token)
    host, _, port = settings.listen.rpartition(":")
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    try:
        bound = await loop.create_server(asyncio.Protocol, host, int(port), start_serving=False)
    except (OSError, OverflowError) as why:
        problem = f"this host cannot listen there ({why})"
        raise ConfigError("host.listen", settings.listen, problem, "write an address of it") from None
    door = Channel.listen(spawner.on_hello, over, [each.dup() for each in bound.sockets])
    bound.close()
    try:
        yield spawner
    finally:
        door.close()
        over.cancel()
