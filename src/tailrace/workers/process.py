"""A worker process as the controller sees it: started, asked, watched, ended.

A worker that ends before it was asked to makes every open and every later call raise WorkerDied,
which says how it ended and its last words. A worker whose controller is gone ends by itself
(child.py). Each worker leads a process group, so ending it ends whatever it started.
"""

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tailrace.clock import waiting
from tailrace.errors import WorkerDied
from tailrace.settings import Settings
from tailrace.workers.channel import ControllerChannel
from tailrace.workers.exits import exit_cause, kill_group
from tailrace.workers.messages import BadConfig, Refused

Answer = TypeVar("Answer", bound=msgspec.Struct)

LAST_WORDS_BYTES = 4096
CLOSE_S = 5.0
"""How long a worker may take to end before it is killed."""


class WorkerProcess:
    """One worker process. Made by `spawn`."""

    def __init__(
        self, name: str, log: "_Log", process: asyncio.subprocess.Process, end: socket.socket, decoder: Any
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.on_message: Callable[[msgspec.Struct], None] = self.answer
        """Called with each message, in order. Answers are to be passed to `answer`."""
        self._log = log
        self._process = process
        self._open: set[asyncio.Future[Any]] = set()
        self._answers: deque[asyncio.Future[msgspec.Struct]] = deque()
        self._last_words = ""
        """Why it is dead; empty while it lives."""
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
        job: Settings,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        logs: Path,
        threads: int = 1,
        pin: int | None = None,
    ) -> "WorkerProcess":
        """Start `python -m module` with a job.

        Args:
            decoder: of everything the worker may say.
            logs: the folder in which `<name>.log` gets what the worker prints.
            threads: of torch and of whatever else computes in it.
            pin: the CPU it runs on, where the system can do that; None: any.
        """
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
                env=_environment(threads),
                start_new_session=True,
            )
        if pin is not None and sys.platform == "linux":
            os.sched_setaffinity(process.pid, {pin})
        return cls(name, _Log(log, begins), process, mine, decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Tell it something.

        Raises:
            WorkerDied: it is dead.
        """
        if self._last_words:
            raise WorkerDied(self._last_words)
        self._channel.send(message)

    def promise(self) -> asyncio.Future[Any]:
        """A future that raises WorkerDied if the worker ends first."""
        future = asyncio.get_running_loop().create_future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._last_words:
            self._fail(future)
        return future

    def next_answer(self) -> asyncio.Future[msgspec.Struct]:
        """The first answer that is nobody's yet."""
        future = self.promise()
        self._answers.append(future)
        return future

    def answer(self, message: msgspec.Struct) -> None:
        """Give a message to whoever has waited longest for an answer."""
        future = self._answers.popleft()
        if not future.done():
            future.set_result(message)

    async def ask(self, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Send a message and wait for its answer, which is of a kind.

        Raises:
            WorkerDied: it ended first.
            CheckpointError, ScheduleError: it refused.
        """
        self.send(message)
        return await self.answered(kind, f"{self.name}: {type(message).__name__}")

    async def answered(self, kind: type[Answer], what: str) -> Answer:
        """The next answer, which is of a kind; an error that travels as a message is raised."""
        with waiting(what):
            answer = await self.next_answer()
        if isinstance(answer, BadConfig | Refused):
            raise answer.error()
        assert isinstance(answer, kind), answer
        return answer

    async def died(self) -> None:
        """Wait for its end.

        Raises:
            WorkerDied: always, when it ends; cancel this first if it is meant to.
        """
        await asyncio.shield(self._watcher)
        raise WorkerDied(self._last_words)

    def kill(self) -> None:
        """SIGKILL to it and to all it started."""
        if not self._last_words:
            kill_group(self.pid)

    async def close(self) -> None:
        """Let it end, and kill it if it does not within CLOSE_S."""
        self._channel.finish()
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self._watcher)
        except TimeoutError:
            pass
        finally:
            self.kill()
        await self._watcher

    def _give_up(self, defect: Exception) -> None:
        """What it said cannot be read or handled: a defect of ours, which must not hang the run."""
        self._defect = defect
        self.kill()

    async def _watch(self) -> None:
        exit_code = await self._process.wait()
        kill_group(self.pid)  # what it started and left behind
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
        future.exception()  # nobody may be left to ask, of which asyncio would complain

    def _describe_end(self, exit_code: int) -> str:
        how = f"{self.name} (process {self.pid}) ended: {exit_cause(exit_code)}"
        if self._defect is not None:
            return f"{how}; the controller could not handle what it said: {self._defect!r}"
        words = self._log.last_words()
        return f"{how}; the end of {self._log.path}:\n{words}" if words else f"{how}; it printed nothing"


@dataclass(frozen=True, slots=True)
class _Log:
    path: Path
    begins: int
    """Where the words of this process begin: a run that is resumed writes on."""

    def last_words(self) -> str:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(max(self.begins, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
            return file.read().decode(errors="replace").strip()
        return ""


_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _environment(threads: int) -> dict[str, str]:
    """Of a worker. Thread counts must stand before the libraries are loaded; modules are found where
    the controller finds them; what it prints, and the stack of a crash, are in its log at once."""
    return {
        **os.environ,
        **{name: str(threads) for name in _THREAD_VARIABLES},
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
