"""A worker process on this host: its start, its end, and what watches over it.

A worker is forked from a server that has imported torch and the modules of the workers (preload.py), so it
starts in milliseconds, also an engine that replaces a dead one. It is a new interpreter where the environment
of the server is not that of the worker.

A worker ends when its controller is gone, also in the middle of work, stopped, or still starting:

- The kernel kills it when its parent dies: the controller, or the fork server, which the kernel kills when
  the controller dies.
- A worker that must clean up first is only continued by the kernel, in case it is stopped. A thread of it
  waits until the connection is closed, cleans up, and kills the process.

WorkerDied shows the exit cause and the end of the worker's log. Each worker leads a process group, so to kill
the group kills what the worker started. Signals are the controller's to handle: what sends them to every
process must not take the trainer away before its weights are saved.
"""

import asyncio
import atexit
import concurrent.futures
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.forkserver import _forkserver
from multiprocessing.process import BaseProcess, _children  # type: ignore[attr-defined]
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from tailrace.devices import Devices
from tailrace.drivers.workers.calls import Process, RemoteWorker, Spawner
from tailrace.drivers.workers.process_tree import (
    CONTROLLER,
    exit_cause,
    exit_code_of_zombie,
    is_stopped,
    kill_group,
    parent_of,
    signal_on_parent_death,
)
from tailrace.drivers.workers.strangers import raise_file_limit
from tailrace.drivers.workers.wire import Hello, SocketAddress
from tailrace.drivers.workers.worker import Job, Worker, WorkerConnection
from tailrace.errors import ConfigError, WorkerDied

LOG_END_BYTES = 8192
"""The end of a worker's log that WorkerDied shows."""
LOOK_S = 1.0
"""Seconds between two looks whether a worker is stopped."""
READ_AT_IMPORT = ("CUDA_", "HF_", "MKL_", "OMP_", "PYTORCH_", "TORCH", "TRANSFORMERS_")
"""Prefixes of the variables that torch and transformers read when they are imported."""
_M_MMAP_THRESHOLD = -3
"""Option of mallopt, from glibc's malloc.h."""
Method = Literal["forkserver", "spawn"]


@dataclass(frozen=True, slots=True)
class Start:
    """Instructions for a new process.

    Args:
        name: of the worker, for `ps`, `top` and messages.
        kind: module and name of the worker's class.
        address: where it dials in.
        environment: all its variables.
        cpus: it may run on; empty: all.
        log: receives its output; None: the output is that of its parent.
    """

    name: str
    kind: tuple[str, str]
    address: SocketAddress
    hello: Hello
    environment: dict[str, str]
    cpus: tuple[int, ...]
    log: Path | None


class LocalSpawner(Spawner):
    """Starts workers on this host. `logs`: the folder of the workers' output, `<name>.log`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    @override
    async def start(
        self, name: str, kind: type[Worker], job: Job, devices: Devices | None = None
    ) -> RemoteWorker:
        worker = RemoteWorker(name, kind, job)
        address, token = await worker.listen()
        try:
            worker.watch(
                await start_process(name, kind, job, address, Hello(token), logs=self._logs, devices=devices)
            )
        except BaseException:
            worker.expect_no_more()
            raise
        return worker


async def start_process(
    name: str,
    kind: type[Worker],
    job: Job,
    address: SocketAddress,
    hello: Hello,
    *,
    logs: Path | None,
    devices: Devices | None = None,
    method: Method | None = None,
) -> "LocalProcess":
    """Start the process of a worker. If this is cancelled, the process can dial in nowhere, and ends.

    Args:
        job: tells the number of threads, and how long it may be stopped.
        logs: the folder that receives its output; None: its output is that of this process.
        method: None: it is forked, if the libraries would find the same variables.
    """
    log, begins, devices = None, 0, devices or Devices()
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}.log"
        with log.open("ab") as file:
            begins = file.tell()
    variables, named = environment(job.threads, devices), (kind.__module__, kind.__qualname__)
    start = Start(name, named, address, hello, variables, devices.cpus, log)
    context: Any = multiprocessing.get_context(method or _method())
    process: BaseProcess = context.Process(target=_main, args=(start,), name=name)
    started: concurrent.futures.Future[None] = concurrent.futures.Future()

    def begin() -> None:
        try:
            with _without_main():
                process.start()
            # Neither shall the end of the interpreter wait for it, nor another thread take its exit code.
            _children.discard(process)
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)

    _starts(os.getpid()).put(begin)
    watching = asyncio.create_task(_kill_stopped(job))
    try:
        await asyncio.shield(asyncio.wrap_future(started))
    except EOFError:
        why = f": it was {_for_long(job)}" if watching.done() else ""
        raise WorkerDied(f"{name}: its fork server ended at its start{why}") from None
    finally:
        watching.cancel()
    return LocalProcess(process, log, begins, job)


def preload() -> None:
    """Start the fork server. It imports torch and the modules of the workers beside what this process goes on
    to do; without this call the start of the first worker waits for these seconds."""
    started: concurrent.futures.Future[None] = concurrent.futures.Future()

    def begin() -> None:
        with suppress(OSError), _without_main():  # the start of the first worker repeats it, and says why
            _forkserver.ensure_running()
        started.set_result(None)

    _method()  # remembers the variables that the libraries read
    _starts(os.getpid()).put(begin)
    started.result()


async def _kill_stopped(job: Job, *own: int) -> int:
    """Wait until the fork server or one of some processes is stopped for too long. Kill it; return its id."""
    seen_s, found = 0.0, None
    while found is None or job.health_timeout_s is None or seen_s < job.health_timeout_s:
        await asyncio.sleep(LOOK_S)
        server: int | None = _forkserver._forkserver_pid  # type: ignore[attr-defined]
        found = next((each for each in (*own, server) if each and is_stopped(each)), None)
        seen_s = seen_s + LOOK_S if found else 0.0
    os.kill(found, signal.SIGKILL)
    return found


def _for_long(job: Job) -> str:
    return f"stopped for {job.health_timeout_s:g} s ({job.health_key})"


class LocalProcess(Process):
    """A process on this host."""

    def __init__(self, process: BaseProcess, log: Path | None, log_begins: int, job: Job) -> None:
        assert process.pid is not None
        self.name, self.pid = process.name, process.pid
        self._process, self._job = process, job
        self._log, self._log_begins = log, log_begins
        """The output of this process begins at that byte: a resumed run appends to the file."""
        self.exit_code = 0
        """Once it has ended."""
        self._fault = ""
        """Reason for which it was killed."""

    @override
    async def ended(self) -> str:
        """Returns the exit cause and the end of the log."""
        stopped = asyncio.create_task(self._kill_if_stopped())
        self.exit_code = await self._exit_code()
        stopped.cancel()
        kill_group(self.pid)  # what it has left behind
        reason = f"{self.name} (process {self.pid}) ended: {exit_cause(self.exit_code)}; {self.log_end()}"
        return f"{self.name} {self._fault}; {reason}" if self._fault else reason

    @override
    def kill(self) -> None:
        kill_group(self.pid)
        with suppress(ProcessLookupError):  # it leads no group until it has begun
            os.kill(self.pid, signal.SIGKILL)

    @override
    def abort(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGABRT)  # Python's fault handler writes the stacks
            os.kill(self.pid, signal.SIGCONT)  # it may be stopped

    @override
    def resume(self) -> None:
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGCONT)
            os.kill(parent_of(self.pid), signal.SIGCONT)  # a stopped fork server could not tell its end

    @override
    def log_end(self) -> str:
        if self._log is None:
            return "its output is above"
        with suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(max(self._log_begins, file.seek(0, os.SEEK_END) - LOG_END_BYTES))
            if words := file.read(LOG_END_BYTES).decode(errors="replace").strip():
                return f"the end of {self._log}:\n{words}"
        return "it printed nothing"

    async def _exit_code(self) -> int:
        """Wait for the end. The kernel tells it: a fork server that is stopped would not."""
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        try:
            end = os.pidfd_open(self.pid)
        except (OSError, AttributeError):  # it was reaped already, or this is not Linux
            end = os.dup(self._process.sentinel)
        loop.add_reader(end, is_over.set)
        try:
            await is_over.wait()
        finally:
            loop.remove_reader(end)
            os.close(end)
        if (exit_code := exit_code_of_zombie(self.pid)) is None:  # the fork server has reaped it, and tells
            await asyncio.to_thread(self._process.join, LOOK_S)
            exit_code = self._process.exitcode
        with suppress(ValueError):  # the fork server has not told
            self._process.close()
        # 255 stands for the end of the fork server, with which the kernel kills its workers.
        return -signal.SIGKILL if exit_code in (None, 255) else exit_code

    async def _kill_if_stopped(self) -> None:
        found = await _kill_stopped(self._job, self.pid)
        self._fault = f"was {_for_long(self._job)}"
        if found != self.pid:
            self._fault = f"was killed: its fork server (process {found}) {self._fault}"
        self.kill()


_STARTS: "dict[int, queue.SimpleQueue[Callable[[], None]]]" = {}


def _starts(owner: int) -> "queue.SimpleQueue[Callable[[], None]]":
    """Tasks of the thread that starts processes. The kernel ends a fork server together with the thread that
    has started it, so that is a thread that lives as long as this process. `owner`: id of this process: a
    fork has no thread."""
    starts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            starts.get()()

    if _STARTS.setdefault(owner, starts) is starts:  # of two threads that ask at once, one is the first
        raise_file_limit()
        multiprocessing.get_context("forkserver").set_forkserver_preload(["tailrace.drivers.workers.preload"])
        threading.Thread(target=work, name="starts of workers", daemon=True).start()
    return _STARTS[owner]


@atexit.register
def _continue_tracker() -> None:
    """Let the resource tracker of multiprocessing end with this process, also if it is stopped."""
    if tracker := _resource_tracker._pid:  # type: ignore[attr-defined]
        with suppress(ProcessLookupError):
            os.kill(tracker, signal.SIGCONT)


_first_variables: list[object] = []


def _method() -> Method:
    """Return how a worker is started now. The fork server has the variables of the first start of a process,
    and libraries have read some of them."""
    read = frozenset(item for item in os.environ.items() if item[0].startswith(READ_AT_IMPORT))
    _first_variables.append((os.getpid(), read))
    del _first_variables[1:]
    return "forkserver" if _first_variables[0] == (os.getpid(), read) else "spawn"


@contextmanager
def _without_main() -> Iterator[None]:
    """Start a process that does not import the script or the notebook of the user again. A fork server that
    is started finds the modules that this process finds."""
    path = os.environ.get("PYTHONPATH")
    os.environ[CONTROLLER] = str(os.getpid())
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        del os.environ[CONTROLLER]
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def environment(threads: int, devices: Devices) -> dict[str, str]:
    """Return the environment variables of a worker.

    The libraries read thread counts once, when they are loaded. sys.path is the controller's.
    """
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # The numbers count the devices that the controller sees, which need not be those of the machine.
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = [seen[number] if seen else str(number) for number in devices.gpus]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return {
        "OMP_WAIT_POLICY": "passive",  # threads that spin for work take the cores from other processes
        **os.environ,
        **visible,
        **dict.fromkeys(counts, str(threads)),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }


def _main(start: Start) -> None:
    """Main function of a new process."""
    signal_on_parent_death(signal.SIGKILL, os.getppid())
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    os.setpgid(0, 0)
    if start.log is not None:
        with start.log.open("ab") as log:
            for standard in (1, 2):
                os.dup2(log.fileno(), standard)
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(start.environment)
    sys.argv = [start.name]
    if sys.platform == "linux":
        with suppress(OSError):
            Path("/proc/self/comm").write_text(start.name[:15], encoding="utf-8")
        if start.cpus:
            os.sched_setaffinity(0, start.cpus)
    module, name = start.kind
    kind = getattr(import_module(module), name)
    work(kind, *WorkerConnection.employed(start.address, start.hello, kind.job_type))


def work(kind: type[Worker], connection: WorkerConnection, job: Job) -> None:
    """Do the job that the controller has sent first."""
    if torch := sys.modules.get("torch"):  # it read the environment when it was imported
        if torch.cuda.is_initialized():
            raise SystemExit(
                "a module that is imported before workers are forked has initialised CUDA, which then works "
                "in no worker. bitsandbytes does so: uninstall it, or import it where it is first used"
            )
        torch.set_num_threads(job.threads)
    with connection.refusals():
        _check_folders(job)
    kind.run(job, connection)


def _check_folders(job: Job) -> None:
    """Raises a ConfigError if this host lacks a folder that the job needs."""
    for key, folder in job.folders().items():
        if not folder.is_dir():
            problem = f"node {socket.gethostname()} has no such folder"
            remedy = "put it where every node has it under this path, for example on a shared file system"
            raise ConfigError(key, str(folder), problem, remedy)


def give_memory_back() -> None:
    """Return freed memory to the system and to the GPU. The allocators of glibc and torch keep it."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # without CUDA it does nothing
    _call_glibc("malloc_trim", 0)


def return_freed_tensors() -> None:
    """Let glibc map blocks of 1 MiB and more apart: freed, they return to the system. Page faults cost time.
    By default glibc takes activations from its heap, where small tensors that stay, an adapter's moments,
    divide the freed memory: the next step then needs new memory."""
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, 2**20)


def _call_glibc(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            getattr(ctypes.CDLL(None), name)(*arguments)
