"""The worker's side of calls: its connection, and the class whose methods the controller calls."""

import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

import msgspec
from typing_extensions import override

from tailrace.drivers.workers.process_tree import signal_on_parent_death
from tailrace.drivers.workers.wire import (
    END,
    EVENT,
    READ_BYTES,
    STARTED,
    UNANSWERED,
    Frames,
    Hello,
    MethodCall,
    RaisedError,
    SocketAddress,
    decode_call,
    frame,
    set_options,
    signature_of,
    start,
)
from tailrace.errors import ConfigError, DiskFull, TailraceError, disk_remedy
from tailrace.settings import Settings

A = TypeVar("A")
R = TypeVar("R")
W = TypeVar("W")

DIAL_S = 60.0
"""Seconds in which a worker dials again that was closed without an answer."""


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
        set_options(own)
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
            calls = [decode_call(each) for each in self._frames.feed(data)]
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
