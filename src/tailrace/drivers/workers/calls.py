"""Calls of a worker's methods over one connection, which the worker opens to the controller.

    controller                                          worker process
    RemoteWorker.call(EngineWorker.sleep) ----------->  WorkerConnection, Worker.serve: EngineWorker.sleep()
                <--------- result, error of errors.py, or an event that comes unasked

A message is a method of the worker's class. The types of its arguments and of its result come from its
signature. The first call is `START`, with the worker's job. Calls are executed and answered in order, but for
those of a method that is `beside` the others.

A frame is a length (4 bytes, little-endian) and a msgpack array:

    first frame of a worker    token, role
    to the worker              number of the call, name of the method, arguments
    from the worker            number of the call, "", result
                               number of the call, name of an error, its arguments
                               EVENT, name of an event, the event

The controller never blocks its event loop: what is sent in one tick is written in one system call.
"""

import asyncio
import hmac
import itertools
import os
import queue
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from functools import cache, partial
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
    TypeVarTuple,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from typing_extensions import override

from tailrace import errors
from tailrace.clock import waiting
from tailrace.devices import Devices
from tailrace.drivers.workers.process_tree import signal_on_parent_death
from tailrace.drivers.workers.strangers import Door, Strangers
from tailrace.errors import ConfigError, DiskFull, TailraceError, WorkerDied, disk_remedy
from tailrace.settings import Settings

A = TypeVar("A")
R = TypeVar("R")
W = TypeVar("W")
Ts = TypeVarTuple("Ts")

START, END = "start", "end"
"""Names of the first call, and of the one with which the controller lets a worker end."""
STARTED, UNANSWERED, EVENT = 0, -1, -1
"""Numbers: of the first call, of a call that is not answered, of a message that answers none."""
HELLO_S, HELLO_GRACE_S, HELLO_BYTES = 10.0, 0.1, 1024
"""Limits of the frame with the token, which a worker sends at once."""
DIAL_S = 60.0
"""Seconds in which a worker dials again that was closed without an answer."""
CLOSE_S = 5.0
"""Seconds that a worker may take to end before it is killed."""
DRAIN_S = 1.0
"""Seconds in which the last messages of a process that has ended are read."""
MAX_BYTES = 2**32 - 1
"""Limit of the bytes of a frame."""
_LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 18
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that is lost is noticed within 30 seconds."""

encode = msgspec.msgpack.Encoder().encode


SocketAddress = str | tuple[str, int]
"""A Unix socket of this host, or host and port."""


class Job(Settings):
    """Settings of one worker process; the first message that it receives."""

    health_key: ClassVar[str] = "host.health_timeout_s"
    """The setting of `health_timeout_s`."""
    threads: int = 1
    """Threads that torch and BLAS libraries use."""
    health_timeout_s: float | None = None
    """Seconds that the worker may be stopped; None: as long as its owner waits."""

    def folders(self) -> Mapping[str, Path]:
        """Return the folders that the worker's host must have, by the key of the config that names each."""
        return {}

    def at(self, address: str) -> Self:
        """Return the job for a worker of a host. `address`: under which the other hosts reach that host."""
        return self


J = TypeVar("J", bound=Job)


class MethodCall(NamedTuple):
    """A method that a worker was asked for."""

    number: int
    method: str
    arguments: msgspec.Raw


class MethodReply(NamedTuple):
    """An answer or an event, as the worker sends it."""

    number: int
    kind: str
    content: msgspec.Raw


class Hello(NamedTuple):
    """The first frame of a worker. `role`: of a worker that joins; empty for one that was started for its
    token."""

    token: str
    role: str = ""


class RaisedError(msgspec.Struct, array_like=True):
    """The arguments of an error of errors.py."""

    arguments: list[str | int | float | bool | None]
    named: dict[str, str | int | float | bool | None]

    @classmethod
    def of(cls, error: TailraceError) -> "RaisedError":
        return cls([_plain(each) for each in error.arguments], {k: _plain(v) for k, v in error.named.items()})

    def error(self, kind: str) -> TailraceError:
        error = getattr(errors, kind)(*self.arguments, **self.named)
        assert isinstance(error, TailraceError), kind
        return error


def _plain(value: object) -> str | int | float | bool | None:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


_decode_call = msgspec.msgpack.Decoder(MethodCall).decode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_raised = msgspec.msgpack.Decoder(RaisedError).decode
decode_reply = msgspec.msgpack.Decoder(MethodReply).decode


class Frames:
    """Cuts a stream of bytes into frames. `max_bytes`: of a frame."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytearray]:
        """Yield the frames that `data` completes. The caller must exhaust the iterator. Raises a ValueError
        if a frame is too long."""
        self._bytes += data
        start = 0
        while (body := start + _LENGTH.size) <= len(self._bytes):
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if length > self.max_bytes:
                raise ValueError(f"a frame of {length} bytes")
            if body + length > len(self._bytes):
                break
            yield self._bytes[body : body + length]
            start = body + length
        del self._bytes[:start]


def frame(*parts: object) -> bytes:
    """Return a frame with an array of values."""
    payload = encode(parts)
    return _LENGTH.pack(len(payload)) + payload


class MethodTypes(NamedTuple):
    """The types of a method, as decoders."""

    arguments: msgspec.msgpack.Decoder[Any]
    result: msgspec.msgpack.Decoder[Any]


@cache
def signature_of(method: Callable[..., Any]) -> MethodTypes:
    """Return the types of one call of a method."""
    hints = get_type_hints(method)
    parameters = [hints[name] for name in signature(method).parameters if name != "self"]
    result = hints["return"]
    if hasattr(method, "is_batched"):
        parameters, (result,) = list(get_args(parameters[0])), get_args(result)
        if get_origin(result) is UnionType:  # results or errors
            kinds = [each for each in get_args(result) if isinstance(each, type)]
            (result,) = {*get_args(result)} - {each for each in kinds if issubclass(each, TailraceError)}
    arguments: Any = tuple[*parameters]  # type: ignore[valid-type]
    return MethodTypes(msgspec.msgpack.Decoder(arguments), msgspec.msgpack.Decoder(result))


def outcome_of(reply: MethodReply, method: Callable[..., Any]) -> Any:
    """Return the result of a method, or the error that it raised."""
    if reply.kind:
        return _decode_raised(reply.content).error(reply.kind)
    return signature_of(method).result.decode(reply.content)


def start(job: str) -> None:
    """The types of the first call."""


def beside(method: R) -> R:
    """Mark a method that is executed in a thread of its own as soon as it is called, beside other calls."""
    method.is_beside = True  # type: ignore[attr-defined]
    return method


def batched(method: Callable[[W, list[A]], Iterable[R | TailraceError]]) -> Callable[[W, A], R]:
    """Mark a method that executes all calls which have arrived together. It takes and gives an entry for each
    call. An entry of the result may be an error of errors.py."""
    method.is_batched = True  # type: ignore[attr-defined]
    return cast(Callable[[W, A], R], method)


class WorkerConnection:
    """The worker's end of a connection. Any thread may send."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(True)
        self.socket = own
        self._frames = Frames()
        self._sending = threading.Lock()
        self._held: list[MethodCall] = []
        """Calls that have arrived together with the first one."""
        self._is_over = self.is_let_go = False

    @classmethod
    def dial(cls, address: SocketAddress, hello: Hello, timeout_s: float | None = None) -> "WorkerConnection":
        """Connect to a controller and show the token. Raises an OSError if nothing answers at the address."""
        if isinstance(address, str):
            own = socket.socket(socket.AF_UNIX)
            own.connect(address)
        else:
            own = socket.create_connection(address, timeout_s)
        _set_options(own)
        own.sendall(frame(*hello))
        return cls(own)

    @classmethod
    def employed(cls, address: SocketAddress, hello: Hello, kind: type[J]) -> "tuple[WorkerConnection, J]":
        """Dial in and wait for the job; again if strangers crowd the port and the controller closes the
        connection before it has read the token. Raises SystemExit if it has no use for this worker."""
        ends_s = time.monotonic() + DIAL_S
        while (left_s := ends_s - time.monotonic()) > 0:
            with suppress(ConnectionResetError, BrokenPipeError):  # it is closed while it shows the token
                connection = cls.dial(address, hello, left_s)
                if job := connection.receive_job(kind):
                    return connection, job
                connection.socket.close()
                if connection.is_let_go or isinstance(address, str):
                    break
            time.sleep(0.05)
        raise SystemExit("the controller does not know the token, expects no such worker, or has ended")

    def receive_job(self, kind: type[J]) -> J | None:
        """Return the job, which is the first call; None if the controller has no use for this worker."""
        if (calls := self.receive(wait=True)) is None:
            return None
        asked, *self._held = calls
        (job,) = signature_of(start).arguments.decode(asked.arguments)
        return kind.model_validate_json(job)

    def receive(self, *, wait: bool) -> list[MethodCall] | None:
        """Return the calls that have arrived; None when the controller lets the worker end, or is gone. With
        `wait` there is at least one."""
        if self._held:
            held, self._held = self._held, []
            return held
        while not self._is_over:
            try:
                data = self.socket.recv(READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            except ConnectionError:
                return None
            calls = [_decode_call(each) for each in self._frames.feed(data)]
            self._is_over = not data
            while calls and calls[-1].method == END:  # a worker may be closed twice
                self._is_over = self.is_let_go = True
                del calls[-1]
            if calls:
                return calls
        return None

    def __iter__(self) -> Iterator[MethodCall]:
        """Yield each call as it arrives, until the controller lets the worker end."""
        while (calls := self.receive(wait=True)) is not None:
            yield from calls

    def in_turn(self, worker: "Worker") -> Iterator[MethodCall]:
        """Yield the calls that are executed one after another. The others are executed when they arrive."""
        others: queue.SimpleQueue[MethodCall | Exception | None] = queue.SimpleQueue()

        def read() -> None:
            end = None
            try:
                for call in self:
                    if not self.execute_beside(worker, call):
                        others.put(call)
            except Exception as error:
                end = error
            others.put(end)

        threading.Thread(target=read, name="calls", daemon=True).start()
        while (call := others.get()) is not None:
            if isinstance(call, Exception):
                raise call
            yield call

    def execute_beside(self, worker: object, call: MethodCall) -> bool:
        """Execute a call of a method that is `beside` others in a thread; else return False. An error that is
        no answer ends the process, as in the main thread."""

        def work() -> None:
            try:
                self.execute(worker, call)
            except BaseException:
                traceback.print_exc()
                os._exit(1)

        if is_beside := hasattr(getattr(type(worker), call.method), "is_beside"):
            threading.Thread(target=work, daemon=True).start()
        return is_beside

    def execute(self, worker: object, call: MethodCall) -> None:
        """Execute a call and answer it. An error of errors.py is an answer; any other is raised."""
        method = getattr(type(worker), call.method)
        arguments = signature_of(method).arguments.decode(call.arguments)
        try:
            result = method(worker, *arguments)
        except TailraceError as error:
            result = error
        self.answer(call.number, result)

    def execute_batch(self, worker: object, calls: Sequence[MethodCall]) -> None:
        """Execute calls of one method, which is `batched`, and answer them."""
        method = getattr(type(worker), calls[0].method)
        decode = signature_of(method).arguments.decode
        results = method(worker, [argument for call in calls for argument in decode(call.arguments)])
        for call, result in zip(calls, results, strict=True):
            self.answer(call.number, result)

    def answer(self, number: int, result: object) -> None:
        """Send the result of a call, or its error."""
        if number == UNANSWERED:
            if isinstance(result, TailraceError):
                raise result
        elif isinstance(result, TailraceError):
            self._send(frame(number, type(result).__name__, RaisedError.of(result)))
        else:
            self._send(frame(number, "", result))

    def tell(self, event: msgspec.Struct) -> None:
        """Send an event, which must be among the worker's `events`."""
        self._send(frame(EVENT, type(event).__name__, event))

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Answer START with the ConfigError of the block, or with a full disk, and exit."""
        try:
            yield
        except (ConfigError, OSError) as error:
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and cause.errno in (ENOSPC, EDQUOT, EFBIG):
                self.answer(STARTED, DiskFull(f"{cause}; {disk_remedy(cause)}, then --resume"))
            elif isinstance(error, ConfigError):
                self.answer(STARTED, error)
            else:
                raise
            sys.exit(2)

    def end_process_with_controller(self, clean_up: Callable[[], None] | None = None) -> None:
        """Kill this process and its process group once the controller is gone, or what started the process,
        such as `tailrace join`. `clean_up`: called before that."""
        parent = os.pidfd_open(os.getppid()) if sys.platform == "linux" else None
        if clean_up is not None:
            signal_on_parent_death(signal.SIGCONT, os.getppid())

        def watch() -> None:
            ends = select.poll()
            ends.register(self.socket, select.POLLRDHUP)
            if parent is not None:
                ends.register(parent, select.POLLIN)
            ends.poll()
            if clean_up is not None:
                clean_up()
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, name="end with controller", daemon=True).start()

    def _send(self, data: bytes) -> None:
        with self._sending:
            self.socket.sendall(data)


class Worker:
    """Code of a worker process. The controller may call its public methods, except `run` and `serve`. The
    file of a subclass imports torch in methods only: the controller reads it, too."""

    job_type: ClassVar[type[Job]] = Job
    role: ClassVar[str] = ""
    """Role under which a worker of another host may join."""
    events: ClassVar[tuple[type[msgspec.Struct], ...]] = ()
    """Events that it may send."""

    @classmethod
    def run(cls, job: Any, connection: WorkerConnection) -> None:
        """Do a job until the controller lets the process end."""
        connection.end_process_with_controller()
        with connection.refusals():
            worker = cls.load_job(job, connection)
        connection.answer(STARTED, None)
        worker.serve(connection)

    @classmethod
    def load_job(cls, job: Any, connection: WorkerConnection) -> Self:
        """Load what the job names. Raises a ConfigError if it cannot be loaded."""
        raise NotImplementedError

    def serve(self, connection: WorkerConnection) -> None:
        """Execute calls until the controller lets the process end."""
        for call in connection:
            connection.execute(self, call)


class BatchWorker(Worker):
    """A worker with one method, which is `batched`. What arrives while a batch is computed is the next."""

    @override
    def serve(self, connection: WorkerConnection) -> None:
        while (calls := connection.receive(wait=True)) is not None:
            connection.execute_batch(self, calls)


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
        _set_options(transport.get_extra_info("socket"))
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
                    self._on_hello(self, _decode_hello(each))
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


def _set_options(own: socket.socket) -> None:
    """Send at once, and notice a host that is lost."""
    if own.family == socket.AF_UNIX:
        return
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
