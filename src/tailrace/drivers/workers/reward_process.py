"""The processes of one reward worker.

    supervisor           no user code: bounds the log, ends all other processes with the controller
    `-- loader           no user code
        `-- importer     imports the reward function once; forks the next server in milliseconds
            `-- server   makes the calls; leads a process group, which is killed when a call is too slow

Forks of an importer that has started threads or CUDA could not make calls. Then the loader forks the servers,
and each imports the function.

Each server has a socket of its own, to the process that forked it: what a call writes to its descriptors
reaches nothing else. All but the servers adopt orphans, so processes that a call started are found and killed
even if they have a session of their own: those of a call that was stopped by what forked its server, all
others by the supervisor.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from typing_extensions import override

from tailrace.drivers.data.settings import DataSettings
from tailrace.drivers.reward.calls import Call, Scores
from tailrace.drivers.reward.functions import Scorer
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.workers.process_tree import (
    adopt_orphans,
    children_of,
    exit_cause,
    kill_descendants,
    kill_group,
    signal_on_parent_death,
    status_of,
    wait_for,
)
from tailrace.drivers.workers.wire import READ_BYTES, STARTED, Frames, decode_reply, frame, outcome_of, start
from tailrace.drivers.workers.worker import Job, Worker, WorkerConnection
from tailrace.errors import RewardFailed

MAX_LOG_BYTES = 10 * 2**20
"""Output of the reward function that is kept in the log; the rest is discarded."""
DRAIN_S = 2.0
"""Seconds in which the rest of the output is copied to the log at the end."""
REAP_EVERY_S = 0.1
"""Seconds after which the end of a server is noticed whose socket a process that it left holds open."""
IMPORT_IN_SERVERS = 75
"""Exit code of an importer whose forks could not make calls."""

Load = Callable[[WorkerConnection], Scorer]


class RewardJob(Job):
    """Call a reward function."""

    reward: RewardSettings
    data: DataSettings


class RewardWorker(Worker):
    """Makes one call at a time. One that takes too long is killed with its process, which is replaced."""

    job_type = RewardJob
    role = "reward"

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    @override
    @classmethod
    def run(cls, job: RewardJob, connection: WorkerConnection) -> None:
        sys.exit(supervise(connection, job))

    def score(self, calls: list[Call]) -> list[Scores]:
        """Score completions to one prompt within `reward.timeout_s`. Raises a RewardFailed if one of them has
        no reward."""
        return self._scorer.score(calls)


def supervise(connection: WorkerConnection, job: RewardJob) -> int:
    """Run the loader until it ends, or until the controller is gone. Return the exit code."""
    adopt_orphans()
    read_end, write_end = os.pipe()
    supervisor = os.getpid()
    loader = os.fork()
    if loader == 0:
        os.close(read_end)
        _run_loader(connection, job, supervisor, write_end)
    os.close(write_end)
    connection.end_process_with_controller(clean_up=kill_descendants)
    log = threading.Thread(target=copy_bounded, args=(read_end, sys.stdout.fileno()), daemon=True)
    log.start()
    exit_code = os.waitstatus_to_exitcode(wait_for(loader))
    kill_descendants()
    log.join(DRAIN_S)
    return _told(exit_code)


def _detach(kept: int) -> None:
    """Let the descriptors that the supervisor has lead nowhere in the loader and in what it forks: what a
    call writes to one of them would end the fork server. `kept`: the descriptor of the connection."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number not in (kept, null):
            os.dup2(null, number)
    os.close(null)


def copy_bounded(source: int, target: int, limit: int = MAX_LOG_BYTES) -> None:
    """Copy from one file descriptor to another until the end, and discard what exceeds the limit. `limit`:
    bytes; a last line says that there was more."""
    room = limit
    while data := os.read(source, 1 << 16):
        kept, was_full = data[: max(room, 0)], room < 0
        room -= len(data)
        if room < 0 and not was_full:
            kept += f"\n[more than {limit} bytes of output: the rest is discarded]\n".encode()
        with suppress(OSError):  # a full disk must not block the processes that print
            os.write(target, kept)


def _run_loader(connection: WorkerConnection, job: RewardJob, supervisor: int, output: int) -> None:
    """Keep one server running until the controller says no more. Never returns."""
    signal_on_parent_death(signal.SIGKILL, supervisor)
    adopt_orphans()
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    _detach(connection.socket.fileno())

    def load(connection: WorkerConnection) -> Scorer:
        with connection.refusals():
            return Scorer.load(job.reward, job.data)

    loader, timeout_s = os.getpid(), job.reward.timeout_s
    with _exiting():
        if (importer := os.fork()) == 0:
            signal_on_parent_death(signal.SIGKILL, loader)
            adopt_orphans()
            scorer = load(connection)
            if not _can_fork():
                sys.exit(IMPORT_IN_SERVERS)
            Servers(lambda _: scorer, connection, timeout_s).keep_one()
        elif (exit_code := os.waitstatus_to_exitcode(wait_for(importer))) == IMPORT_IN_SERVERS:
            kill_descendants()
            Servers(load, connection, timeout_s).keep_one()
        else:
            sys.exit(_told(exit_code))


@contextmanager
def _exiting() -> Iterator[None]:
    """End this process with the block, without what the interpreter does at its end."""
    exit_code = 1
    try:
        yield
        exit_code = 0
    except SystemExit as exit:
        exit_code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(exit_code)


def _told(exit_code: int) -> int:
    """Print which signal has ended a process that loads. Return what to exit with."""
    if exit_code < 0:
        print(f"the process that loads the reward function ended: {exit_cause(exit_code)}", flush=True)
    return abs(exit_code)


def _can_fork() -> bool:
    """Whether forks of this process can make calls: its threads are not in them, and CUDA does not work."""
    torch = sys.modules.get("torch")
    return threading.active_count() == 1 and not (torch and torch.cuda.is_initialized())


class Servers:
    """The servers of a worker, one after another, and the call that is being made.

    Args:
        load: called in each server.
        timeout_s: seconds that a call may take.
    """

    def __init__(self, load: Load, connection: WorkerConnection, timeout_s: float) -> None:
        self._load, self._connection, self._timeout_s = load, connection, timeout_s
        self._call: int | None = None
        """Number of the call that is being made."""
        self._deadline_s = 0.0
        self._has_expired = False
        """The server was killed because its call took too long."""
        self._is_over = False
        """The controller makes no more calls."""

    def keep_one(self) -> None:
        """Keep one server running until the controller says no more."""
        parent, failure = os.getpid(), None
        started_by_import = children_of(parent)  # for instance a pool of processes that the calls use
        while not self._is_over:
            mine, theirs = socket.socketpair()
            with mine, theirs:
                if (server := os.fork()) == 0:
                    mine.close()
                    self._connection.socket.close()
                    _serve(self._load, WorkerConnection(theirs), parent)
                theirs.close()
                with suppress(OSError):  # the server does it too: the second attempt has no effect
                    os.setpgid(server, server)
                has_served, status = self._relay(mine, server, failure)
            exit_code = os.waitstatus_to_exitcode(status)
            if not has_served:
                sys.exit(_told(exit_code) or 1)
            failure = RewardFailed("died", f"the call ended its process: {exit_cause(exit_code)}")
            if self._has_expired:
                failure = RewardFailed("timeout", f"no reward within {self._timeout_s:g} s")
            kill_descendants(spare=started_by_import)

    def _relay(self, own: socket.socket, server: int, failure: RewardFailed | None) -> tuple[bool, int]:
        """Carry calls to a server, and its answers back, until it has ended.

        Args:
            own: the socket to the server.
            failure: outcome of the call that the server before did not answer; None: it is the first server.

        Returns:
            Whether it was ready for calls, and its status.
        """
        lost, self._call, self._has_expired, has_served, frames = self._call, None, False, False, Frames()
        readable = select.poll()
        for each in (own, self._connection.socket):
            readable.register(each, select.POLLIN)
        while True:
            ready = dict(readable.poll(1000 * REAP_EVERY_S))
            if own.fileno() in ready:
                if (outcomes := _received(own, frames)) is None:
                    kill_group(server)
                    return has_served, wait_for(server)
                for number, outcome in outcomes:
                    if number == STARTED:
                        has_served = outcome is None
                        if failure is None:
                            self._connection.answer(STARTED, outcome)
                        elif lost is not None:
                            self._connection.answer(lost, failure)
                    elif number == self._call and not self._has_expired:
                        self._connection.answer(number, outcome)
                        self._call = None
            if self._connection.socket.fileno() in ready and not self._pass_calls_on(own):
                readable.unregister(self._connection.socket)
                if self._call is not None:
                    kill_group(server)
            if self._call is not None and time.monotonic() >= self._deadline_s:
                self._has_expired = True
                kill_group(server)
            if not ready and (status := status_of(server)) is not None:
                return has_served, status

    def _pass_calls_on(self, own: socket.socket) -> bool:
        """Send calls that have arrived to the server. Returns whether there may be more."""
        while calls := self._connection.receive(wait=False):
            for call in calls:
                self._call, self._deadline_s = call.number, time.monotonic() + self._timeout_s
                with suppress(OSError):  # the server has ended
                    own.sendall(frame(*call))
        if calls is None:
            self._is_over = True
            with suppress(OSError):
                own.shutdown(socket.SHUT_WR)
        return not self._is_over


def _received(own: socket.socket, frames: Frames) -> list[tuple[int, object]] | None:
    """Return a server's answers that have arrived; None: it has ended, or a call wrote to its socket."""
    outcomes: list[tuple[int, object]] = []
    try:
        data = own.recv(READ_BYTES)
        for each in map(decode_reply, frames.feed(data)):
            method = start if each.number == STARTED else RewardWorker.score
            outcomes.append((each.number, outcome_of(each, method)))
    except Exception:
        return None
    return outcomes if data else None


def _serve(load: Load, connection: WorkerConnection, parent: int) -> None:
    """Make one call after another until the controller says no more. Never returns."""
    with _exiting():
        os.setpgid(0, 0)
        signal_on_parent_death(signal.SIGKILL, parent)
        for each in (signal.SIGTERM, signal.SIGHUP):  # processes that a call starts can be terminated
            signal.signal(each, signal.SIG_DFL)
        worker = RewardWorker(load(connection))
        connection.answer(STARTED, None)
        worker.serve(connection)
