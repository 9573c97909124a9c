"""Calls of a worker's methods over one connection, which the worker opens to the controller.

    controller                                          worker process
    RemoteWorker.call(EngineWorker.sleep) ----------->  WorkerConnection, Worker.serve: EngineWorker.sleep()
                <--------- result, error of errors.py, or an event that comes unasked

A message is a method of the worker's class. The types of its arguments and of its result come from its
signature. The first call is `START`, with the worker's job. Calls are executed and answered in order, but for
those of a method that is `beside` the others.

The controller never blocks its event loop: what is sent in one tick is written in one system call.
"""

import asyncio
import hmac
import itertools
import secrets
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar, TypeVarTuple

import msgspec
from typing_extensions import override

from tailrace.clock import waiting
from tailrace.devices import Devices
from tailrace.drivers.workers.strangers import Door, Strangers
from tailrace.drivers.workers.wire import (
    END,
    EVENT,
    MAX_BYTES,
    START,
    STARTED,
    UNANSWERED,
    Frames,
    Hello,
    SocketAddress,
    decode_hello,
    decode_reply,
    frame,
    outcome_of,
    set_options,
    start,
)
from tailrace.drivers.workers.worker import Job, Worker
from tailrace.errors import TailraceError, WorkerDied

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

HELLO_S, HELLO_GRACE_S, HELLO_BYTES = 10.0, 0.1, 1024
"""Limits of the frame with the token, which a worker sends at once."""
CLOSE_S = 5.0
"""Seconds that a worker may take to end before it is killed."""
DRAIN_S = 1.0
"""Seconds in which the last messages of a process that has ended are read."""


class Process(Protocol):
    """The process of a worker, on this host or on another."""

    async def ended(self) -> str:
        """Wait until it has ended. Returns the reason."""

    def kill(self) -> None:
        """End it at once, with all that it has started."""

    def abort(self) -> None:
        """End it at once. Its log gets the stack of each thread, where it can."""

    def resume(self) -> None:
        """Continue it if it is stopped, so that it can end."""

    def log_end(self) -> str:
        """Return the end of the worker's output as a clause for error messages."""


class RemoteWorker:
    """The controller's side of a worker.

    If the worker ends before it was asked to, every open and every later call raises WorkerDied.
    """

    process: Process

    def __init__(self, name: str, kind: type[Worker], job: Job) -> None:
        self.name, self.job = name, job
        self.address = "127.0.0.1"
        """Address of the worker's host, once it has connected."""
        self.awaited = f"{name}: start"
        """Name of the wait for its connection."""
        self._early: list[Any] = []
        """Events that came before `subscribe`."""
        self.on_event: Callable[[Any], None] = self._early.append
        """Called with each event, in the order of events and answers."""
        self._events = {each.__name__: msgspec.msgpack.Decoder(each).decode for each in kind.events}
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_connected: asyncio.Future[None] = self._loop.create_future()
        self._is_disconnected = asyncio.Event()
        self._unsent = bytearray()
        self._open: set[asyncio.Future[Any]] = set()
        self._exit_reason: asyncio.Future[str] = self._loop.create_future()
        """The reason for its end."""
        self._fault = ""
        """Fault for which it was aborted."""
        self._defect: Exception | None = None
        """The error of a message for which it was ended."""
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._calls: dict[int, tuple[asyncio.Future[Any], Callable[..., Any]]] = {
            STARTED: (self._started, start)
        }
        self._numbers = itertools.count(1)

    @property
    def has_ended(self) -> bool:
        return self._exit_reason.done()

    async def listen(self, host: str | None = None) -> tuple[SocketAddress, str]:
        """Wait for the worker.

        Args:
            host: an address of this host, at which a worker of another host reaches it. None: it is on this
                host, where a Unix socket is faster.

        Returns:
            Where it shall dial in, and the token that it shall show.
        """
        token = secrets.token_hex(32)

        def on_hello(channel: "Channel", hello: Hello) -> None:
            if hmac.compare_digest(hello.token, token) and self.is_awaited:
                channel.attach(self)
            else:
                channel.refuse()

        listening, address = _listening(host)
        door = Channel.listen(on_hello, self._is_connected, [listening])
        self._is_connected.add_done_callback(lambda _: door.close())
        return address, token

    @property
    def is_awaited(self) -> bool:
        """Whether it may still dial in."""
        return not self._is_connected.done()

    async def disconnected(self) -> None:
        """Wait until its connection has ended."""
        await self._is_disconnected.wait()

    def disconnect(self) -> None:
        """End the connection, or its expectation."""
        if self._transport is None:
            self._is_disconnected.set()
        else:
            self._transport.abort()

    def expect_no_more(self) -> None:
        """Close the port at which the worker would dial in."""
        self._is_connected.cancel()

    def watch(self, process: Process) -> None:
        """Take the process of the worker. Its end is that of the worker."""
        self.process = process
        self._watcher = asyncio.create_task(self._watch())

    def subscribe(self, on_event: Callable[[Any], None]) -> None:
        """Call `on_event` for each event of the worker. Events that arrived earlier are delivered now."""
        self.on_event = on_event
        for event in self._early:
            on_event(event)

    async def connected(self) -> None:
        """Wait until the worker has dialled in. Raises WorkerDied."""
        either: list[asyncio.Future[Any]] = [self._is_connected, self._exit_reason]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._exit_reason.done():
            raise WorkerDied(self._exit_reason.result())

    async def ready(self) -> None:
        """Wait until the worker has loaded what its job names. Raises a ConfigError if it cannot be."""
        with waiting(self.awaited):
            await self.connected()
        with waiting(f"{self.name}: start"):
            await asyncio.shield(self._started)

    def begin(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> "asyncio.Future[R]":
        """Call a method now; return its result as a future. The call runs also if the future is cancelled."""
        number = next(self._numbers)
        data = frame(number, method.__name__, arguments)  # may raise
        future = self._loop.create_future()
        if self._exit_reason.done():
            self._fail(future)
        else:
            self._calls[number] = future, method
            self._write(data)
        return future

    async def call(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> R:
        """Call a method and wait for its result.

        Raises:
            WorkerDied: the worker ended first.
            TailraceError: the method raised it.
        """
        with waiting(f"{self.name}: {method.__name__}"):
            return await self.begin(method, *arguments)

    def send(self, method: Callable[[Any, *Ts], None], *arguments: *Ts) -> None:
        """Call a method that is not answered. Raises a WorkerDied if the worker has ended."""
        if self._exit_reason.done():
            raise WorkerDied(self._exit_reason.result())
        self._write(frame(UNANSWERED, method.__name__, arguments))

    def future(self) -> asyncio.Future[Any]:
        """Return a future that raises WorkerDied if the worker ends first."""
        future = self._loop.create_future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._exit_reason.done():
            self._fail(future)
        return future

    async def died(self) -> None:
        """Wait until the worker ends. Raises a WorkerDied. Cancel it before an intended end."""
        raise WorkerDied(await self.exit_reason())

    async def exit_reason(self) -> str:
        """Wait until the worker ends. Returns the reason."""
        reason: str = await asyncio.shield(self._exit_reason)
        return reason

    def kill(self) -> None:
        """End the worker at once."""
        if not self._exit_reason.done():
            self.process.kill()

    def abort(self, fault: str) -> None:
        """End the worker at once because of a fault. `fault`: what the worker did, to follow its name."""
        self._fault = fault
        self.process.abort()

    async def close(self) -> None:
        """Let the worker end, and kill it if it does not within CLOSE_S."""
        if self._transport is not None and not self._exit_reason.done():
            self._write(frame(UNANSWERED, END, ()))
            self.process.resume()
        try:
            await asyncio.wait([self._watcher], timeout=CLOSE_S if self._transport else 0)
        finally:
            self.kill()
        await asyncio.wait([self._watcher], timeout=CLOSE_S)  # the kernel may hold up its end

    def attach(self, transport: asyncio.Transport) -> None:
        """Take the connection of the worker."""
        self._transport = transport
        if own := transport.get_extra_info("peername"):  # a Unix socket has none
            self.address = own[0]
        job = self.job.at(self.address).model_dump_json()
        self._is_connected.set_result(None)
        self._unsent[:0] = frame(STARTED, START, (job,))
        self._flush()

    def on_message(self, data: bytes | bytearray) -> None:
        """Handle a frame."""
        reply = decode_reply(data)
        if reply.number == EVENT:
            self.on_event(self._events[reply.kind](reply.content))
            return
        future, method = self._calls.pop(reply.number)
        outcome = outcome_of(reply, method)
        if future.done():
            return
        if isinstance(outcome, TailraceError):
            future.set_exception(outcome)
            future.exception()  # otherwise asyncio warns if no caller retrieves it
        else:
            future.set_result(outcome)

    def on_disconnect(self) -> None:
        """Kill the process if its connection has ended and it does not end by itself."""
        self._is_disconnected.set()
        self._loop.call_later(CLOSE_S, self.kill)

    def give_up(self, defect: Exception) -> None:
        """Kill the worker after a message that cannot be decoded or handled, so that no call hangs."""
        self._defect = defect
        self.kill()

    def _write(self, data: bytes) -> None:
        if self._transport and not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += data

    def _flush(self) -> None:
        data, self._unsent = self._unsent, bytearray()
        if self._transport and data and not self._transport.is_closing():
            self._transport.write(data)

    async def _watch(self) -> None:
        reason = await self.process.ended()
        if self._transport is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._is_disconnected.wait()
            self._transport.abort()
        self._is_connected.cancel()
        if self._defect is not None:
            reason += f"; the controller could not handle its message: {self._defect!r}"
        self._exit_reason.set_result(f"{self.name} {self._fault}; {reason}" if self._fault else reason)
        for future in [*self._open, *(future for future, _ in self._calls.values())]:
            if not future.done():
                self._fail(future)

    def _fail(self, future: asyncio.Future[Any]) -> None:
        error = WorkerDied(self._exit_reason.result())
        error.__cause__ = self._defect
        future.set_exception(error)
        future.exception()


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


class Channel(asyncio.Protocol):
    """The controller's end of a connection. It belongs to a worker once that has shown its token.

    Args:
        on_hello: called with the first frame. It attaches the channel to a worker, keeps it, or aborts it.
        over: once it is done no worker is awaited: a channel that has none then is aborted.
        strangers: has it until its first frame.
    """

    transport: asyncio.Transport

    def __init__(
        self, on_hello: "Callable[[Channel, Hello], None]", over: asyncio.Future[None], strangers: Strangers
    ) -> None:
        self._on_hello, self._over, self._strangers = on_hello, over, strangers
        self._frames = Frames(HELLO_BYTES)
        self._worker: RemoteWorker | None = None
        self._has_said_hello = False

    @classmethod
    def listen(
        cls,
        on_hello: "Callable[[Channel, Hello], None]",
        over: asyncio.Future[None],
        sockets: Iterable[socket.socket],
    ) -> Door:
        """Make a channel of each connection to some sockets."""
        strangers = Strangers(HELLO_S, HELLO_GRACE_S)
        return Door(partial(cls, on_hello, over, strangers), sockets, strangers)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        set_options(transport.get_extra_info("socket"))
        self._strangers.add(transport)
        self._over.add_done_callback(self._abort_unattached)

    @override
    def data_received(self, data: bytes) -> None:
        try:
            for each in self._frames.feed(data):
                if self._worker is not None:
                    self._worker.on_message(each)
                elif self._has_said_hello:
                    raise ValueError("a second frame before the job")
                else:
                    self._has_said_hello = True
                    self._strangers.remove(self.transport)
                    self._on_hello(self, decode_hello(each))
        except Exception as defect:
            if self._worker is not None:
                self._worker.give_up(defect)
            self.transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.remove(self.transport)
        self._over.remove_done_callback(self._abort_unattached)
        if self._worker is not None:
            self._worker.on_disconnect()

    def attach(self, worker: RemoteWorker) -> None:
        """Give the connection to a worker."""
        self._worker = worker
        self._frames.max_bytes = MAX_BYTES
        worker.attach(self.transport)

    def refuse(self) -> None:
        """Tell a worker that it is not expected: one that is closed without a word dials again."""
        self.transport.write(frame(UNANSWERED, END, ()))
        self.transport.close()

    def _abort_unattached(self, _: asyncio.Future[None]) -> None:
        if self._worker is None:
            self.transport.abort()


def _listening(host: str | None) -> tuple[socket.socket, SocketAddress]:
    """Return a socket that listens, and its address."""
    if host is None:
        listening, name = socket.socket(socket.AF_UNIX), f"\0tailrace-{secrets.token_hex(16)}"
        listening.bind(name)
        listening.listen()
        return listening, name
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    return listening, listening.getsockname()[:2]
