"""A worker process from the controller's side: start, supervision, end.

WorkerDied shows the exit cause and the end of the worker's log. A worker ends when its controller is gone
(child.py). Each worker leads a process group, so to kill the group kills what the worker started.

A worker is a new interpreter (`executed`), or forked from a process that has imported its module (`forked`).
"""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tailrace.devices import Devices
from tailrace.errors import WorkerDied
from tailrace.workers.channel import ControllerChannel
from tailrace.workers.conversation import Conversation
from tailrace.workers.forked import ForkServer, Start
from tailrace.workers.messages import Job
from tailrace.workers.orphans import exit_cause, is_stopped, kill_group, parent_of, signal_on_parent_death

LAST_WORDS_BYTES = 8192
"""The end of a worker's log that WorkerDied shows."""
CLOSE_S = 5.0
"""Seconds that a worker may take to end before it is killed."""
LOOK_S = 1.0
"""Seconds between two looks whether a worker is stopped."""


class Process(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Return the exit code, as `subprocess` gives it."""


class Begin(Protocol):
    """Starts the process of a worker."""

    async def __call__(
        self, name: str, module: str, job: Job, end: socket.socket, log: int, devices: Devices
    ) -> Process:
        """Start it.

        Args:
            end: its end of the socket.
            log: the file that receives its output.
        """


class WorkerProcess(Conversation):
    """One worker process, with a socket to it. Made by `spawn`."""

    def __init__(
        self,
        name: str,
        process: Process,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        log: Path,
        log_begins: int,
        health_timeout_s: float | None,
    ) -> None:
        super().__init__(name)
        self.pid = process.pid
        self._log, self._log_begins = log, log_begins
        """The output of this process begins at that byte: a resumed run appends to the file."""
        self._process, self._health_timeout_s = process, health_timeout_s
        self._channel = ControllerChannel(
            end, decoder, lambda message: self.on_message(message), self._give_up
        )
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def spawn(
        cls,
        name: str,
        module: str,
        job: Job,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        logs: Path,
        devices: Devices | None = None,
        begin: Begin | None = None,
    ) -> "WorkerProcess":
        """Start `python -m module` with a job.

        Args:
            decoder: decodes the messages of the worker.
            logs: the folder in which `<name>.log` receives the worker's output.
            devices: what the worker may use of this machine; None: everything.
            begin: starts the process; None: `executed`.

        Raises:
            WorkerDied: it could not be started.
        """
        mine, theirs = socket.socketpair()
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}.log"
        with theirs, log.open("ab") as output:
            begins = output.tell()
            try:
                process = await (begin or executed)(
                    name, module, job, theirs, output.fileno(), devices or Devices()
                )
            except BaseException:
                mine.close()
                raise
        return cls(name, process, mine, decoder, log, begins, job.health_timeout_s)

    def log_end(self) -> str:
        """As Conversation.log_end."""
        with suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(max(self._log_begins, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
            if words := file.read(LAST_WORDS_BYTES).decode(errors="replace").strip():
                return f"the end of {self._log}:\n{words}"
        return "it printed nothing"

    def kill_group(self, leader: int) -> None:
        """As Conversation.kill_group."""
        kill_group(leader)

    def kill(self) -> None:
        """Send SIGKILL to its process group."""
        if not self._words.done():
            kill_group(self.pid)

    def abort(self, fault: str) -> None:
        """As Conversation.abort."""
        self._fault = fault
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGABRT)  # Python's fault handler writes the stacks
            os.kill(self.pid, signal.SIGCONT)  # it may be stopped

    async def close(self) -> None:
        """Let the process end, and kill it if it does not within CLOSE_S."""
        self._channel.finish()
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGCONT)  # a stopped process could not end by itself
            os.kill(parent_of(self.pid), signal.SIGCONT)  # nor could a stopped fork server tell its end
        try:
            await asyncio.wait([self._watcher], timeout=CLOSE_S)
        finally:
            self.kill()
        await self._watcher

    def _write(self, message: msgspec.Struct) -> None:
        self._channel.send(message)

    def _give_up(self, defect: Exception) -> None:
        """Kill the worker after a message that cannot be decoded or handled, so that no request hangs."""
        self._cause = defect
        self.kill()

    async def _watch(self) -> None:
        stopped = asyncio.create_task(self._kill_if_stopped())
        exit_code = await self._process.wait()
        stopped.cancel()
        kill_group(self.pid)  # what it has left behind
        self._channel.read()
        self._channel.close()
        self._ended(self._describe_end(exit_code))

    async def _kill_if_stopped(self) -> None:
        seen_s = 0.0
        while self._health_timeout_s is not None:
            await asyncio.sleep(LOOK_S)
            seen_s = seen_s + LOOK_S if is_stopped(self.pid) else 0.0
            if seen_s >= self._health_timeout_s:
                self._fault = f"was stopped for {self._health_timeout_s:g} s (host.health_timeout_s)"
                return self.kill()

    def _describe_end(self, exit_code: int) -> str:
        how = f"{self.name} (process {self.pid}) ended: {exit_cause(exit_code)}"
        if self._cause is not None:
            return f"{how}; the controller could not handle its message: {self._cause!r}"
        return f"{how}; {self.log_end()}"


async def executed(
    name: str, module: str, job: Job, end: socket.socket, log: int, devices: Devices
) -> Process:
    """As Begin: a new interpreter."""
    parent = os.getpid()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, str(end.fileno()), job.model_dump_json()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[end.fileno()],
        env=_environment(job.threads, devices),
        start_new_session=True,
        preexec_fn=lambda: signal_on_parent_death(signal.SIGKILL, parent),
    )
    if devices.cpus and sys.platform == "linux":
        os.sched_setaffinity(process.pid, devices.cpus)
    return process


async def forked(name: str, module: str, job: Job, end: socket.socket, log: int, devices: Devices) -> Process:
    """As Begin: forked from a process that has imported the module.

    Raises:
        WorkerDied: that process has ended twice.
    """
    environment = _environment(job.threads, devices)
    path = [entry for entry in sys.path if entry]
    start = Start(
        name, module, job.model_dump_json(), job.threads, environment, path, os.getcwd(), list(devices.cpus)
    )
    # Threads of BLAS libraries would not survive a fork. To ask NVML for GPUs does not initialise CUDA.
    servers = _environment(1, Devices()) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    for _ in range(2):  # the first may end for want of workers at this moment
        server = ForkServer.shared(servers, log)
        with suppress(EOFError):
            return await server.fork(start, end, log)
        cause = exit_cause(server.kill())
    raise WorkerDied(f"{name} was not started: the process that forks workers ended: {cause}")


def _environment(threads: int, devices: Devices) -> dict[str, str]:
    """Return the environment variables of a worker.

    The libraries read thread counts once, when they are loaded. sys.path is the controller's. Output is
    written to the log at once, and so is the Python stack of a crash.
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
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
