"""A worker process from the controller's side: start, requests and answers, supervision, end.

If a worker ends before it was asked to, every open and every later request raises WorkerDied, with the exit
cause and the end of the worker's log. A worker ends when its controller is gone (child.py). Each worker
leads a process group, so to kill the group kills what the worker started.
"""

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from tailrace.clock import waiting
from tailrace.errors import WorkerDied
from tailrace.workers.channel import ControllerChannel
from tailrace.workers.messages import Job, Ready, Refused
from tailrace.workers.orphans import exit_cause, kill_group, signal_on_parent_death

Answer = TypeVar("Answer", bound=msgspec.Struct)
JobT = TypeVar("JobT", bound=Job)

LAST_WORDS_BYTES = 4096
"""The end of a worker's log that WorkerDied shows."""
CLOSE_S = 5.0
"""Seconds that a worker may take to end before it is killed."""


class WorkerProcess:
    """One worker process. Made by `spawn`."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        log: Path,
        log_begins: int,
    ) -> None:
        self.name, self.pid = name, process.pid
        self.on_message: Callable[[msgspec.Struct], None] = self.answer
        """Called with each message, in order. It must pass answers on to `answer`."""
        self._log, self._log_begins = log, log_begins
        """The output of this process begins at that byte: a resumed run appends to the file."""
        self._process = process
        self._open: set[asyncio.Future[Any]] = set()
        self._answers: deque[asyncio.Future[msgspec.Struct]] = deque()
        self._last_words = ""
        """Exit cause and end of the log; empty while the process runs."""
        self._defect: Exception | None = None
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
        pin: int | None = None,
    ) -> "WorkerProcess":
        """Start `python -m module` with a job.

        Args:
            decoder: decodes the messages of the worker.
            logs: the folder in which `<name>.log` receives the worker's output.
            pin: the CPU that the worker runs on, on Linux; None: any.
        """
        parent = os.getpid()
        mine, theirs = socket.socketpair()
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}.log"
        with theirs, log.open("ab") as output:
            begins = output.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(theirs.fileno()), job.model_dump_json()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=_environment(job.threads),
                start_new_session=True,
                preexec_fn=lambda: signal_on_parent_death(signal.SIGKILL, parent),
            )
        if pin is not None and sys.platform == "linux":
            os.sched_setaffinity(process.pid, {pin})
        return cls(name, process, mine, decoder, log, begins)

    @property
    def has_ended(self) -> bool:
        return bool(self._last_words)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            WorkerDied: the process has ended.
        """
        if self._last_words:
            raise WorkerDied(self._last_words)
        self._channel.send(message)

    def promise(self) -> asyncio.Future[Any]:
        """Return a future that raises WorkerDied if the worker ends first."""
        future = asyncio.get_running_loop().create_future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._last_words:
            self._fail(future)
        return future

    def next_answer(self) -> asyncio.Future[msgspec.Struct]:
        """Return a future of the next answer that no earlier caller waits for."""
        future = self.promise()
        self._answers.append(future)
        return future

    def answer(self, message: msgspec.Struct) -> None:
        """Hand an answer to the caller that asked first."""
        future = self._answers.popleft()
        if not future.done():
            future.set_result(message)

    async def ask(self, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Send a message and wait for its answer, as `answered`."""
        self.send(message)
        return await self.answered(self.next_answer(), kind, type(message).__name__)

    async def answered(self, answer: asyncio.Future[msgspec.Struct], kind: type[Answer], what: str) -> Answer:
        """Wait for an answer.

        Args:
            answer: of `next_answer`.
            kind: the type of the answer.
            what: what the process does, for diagnostics.

        Raises:
            WorkerDied: the process ended first.
            TailraceError: the answer is an error message.
        """
        with waiting(f"{self.name}: {what}"):
            found = await answer
        if isinstance(found, Refused):
            raise found.error()
        assert isinstance(found, kind), found
        return found

    async def died(self) -> None:
        """Wait until the process ends.

        Raises:
            WorkerDied: always; cancel this wait before an intended end.
        """
        raise WorkerDied(await self.last_words())

    async def last_words(self) -> str:
        """Wait until the process ends. Returns its exit cause and the end of its log."""
        await asyncio.shield(self._watcher)
        return self._last_words

    def log_end(self) -> str:
        """The end of its log, to follow in a sentence."""
        with suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(max(self._log_begins, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
            if words := file.read().decode(errors="replace").strip():
                return f"the end of {self._log}:\n{words}"
        return "it printed nothing"

    def kill(self) -> None:
        """Send SIGKILL to its process group."""
        if not self._last_words:
            kill_group(self.pid)

    async def close(self) -> None:
        """Let the process end, and kill it if it does not within CLOSE_S."""
        self._channel.finish()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)  # a stopped process could not end by itself
        try:
            await asyncio.wait([self._watcher], timeout=CLOSE_S)
        finally:
            self.kill()
        await self._watcher

    def _give_up(self, defect: Exception) -> None:
        """Kill the worker after a message that cannot be decoded or handled, so that no request hangs."""
        self._defect = defect
        self.kill()

    async def _watch(self) -> None:
        exit_code = await self._process.wait()
        kill_group(self.pid)  # what it has left behind
        self._channel.read()
        self._channel.close()
        self._last_words = self._describe_end(exit_code)
        for future in list(self._open):
            if not future.done():
                self._fail(future)

    def _fail(self, future: asyncio.Future[Any]) -> None:
        error = WorkerDied(self._last_words)
        error.__cause__ = self._defect
        future.set_exception(error)
        future.exception()  # otherwise asyncio warns if no caller retrieves it

    def _describe_end(self, exit_code: int) -> str:
        how = f"{self.name} (process {self.pid}) ended: {exit_cause(exit_code)}"
        if self._defect is not None:
            return f"{how}; the controller could not handle its message: {self._defect!r}"
        return f"{how}; {self.log_end()}"


class RemoteWorker(Generic[JobT]):
    """What the controller's sides of all workers have in common. Their methods raise WorkerDied if the
    process has ended."""

    module: ClassVar[str]
    """The module that the process runs."""
    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]
    """Decodes the messages of the process."""

    def __init__(self, process: WorkerProcess, job: JobT) -> None:
        self.process, self.job = process, job
        self._started = process.next_answer()

    @classmethod
    async def spawn(cls, name: str, job: JobT, *, logs: Path, pin: int | None = None) -> Self:
        """Start the process, as `WorkerProcess.spawn`."""
        return cls(await WorkerProcess.spawn(name, cls.module, job, cls.decoder, logs=logs, pin=pin), job)

    async def ready(self) -> None:
        """Wait until the process has loaded what its job names.

        Raises:
            ConfigError: it cannot be loaded.
        """
        await self.process.answered(self._started, Ready, "start")

    async def close(self) -> None:
        """End the process."""
        await self.process.close()


def _environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a worker.

    The libraries read thread counts once, when they are loaded. sys.path is the controller's. Output is
    written to the log at once, and so is the Python stack of a crash.
    """
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        **os.environ,
        **dict.fromkeys(counts, str(threads)),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
