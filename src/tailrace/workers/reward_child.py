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
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import msgspec

from tailrace.errors import RewardFailed
from tailrace.reward.base import Call, Scores
from tailrace.reward.functions import Scorer
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.child import begin, config_errors_sent, end_with_controller
from tailrace.workers.messages import Ready, ScorerJob
from tailrace.workers.orphans import (
    adopt_orphans,
    children_of,
    exit_cause,
    kill_descendants,
    kill_group,
    signal_on_parent_death,
    status_of,
    wait_for,
)
from tailrace.workers.reward_messages import Failed, FromScorer, Score, Scored, Serving

MAX_LOG_BYTES = 10 * 2**20
"""Output of the reward function that is kept in the log; the rest is discarded."""
DRAIN_S = 2.0
"""Seconds in which the rest of the output is copied to the log at the end."""
REAP_EVERY_MS = 100
"""Milliseconds after which the end of a server is noticed whose socket a process that it left holds open."""
IMPORT_IN_SERVERS = 75
"""Exit code of an importer whose forks could not make calls."""

Channel: TypeAlias = WorkerChannel[Score]
Load: TypeAlias = Callable[[Channel], Scorer]


def supervise(end: socket.socket, job: ScorerJob) -> int:
    """Run the loader until it ends, or until the controller is gone.

    Returns:
        The exit code.
    """
    adopt_orphans()
    read_end, write_end = os.pipe()
    supervisor = os.getpid()
    loader = os.fork()
    if loader == 0:
        os.close(read_end)
        _run_loader(end, job, supervisor, write_end)
    os.close(write_end)
    end_with_controller(end, clean_up=kill_descendants)
    log = threading.Thread(target=copy_bounded, args=(read_end, sys.stdout.fileno()), daemon=True)
    log.start()
    exit_code = os.waitstatus_to_exitcode(wait_for(loader))
    kill_descendants()
    log.join(DRAIN_S)
    return _told(exit_code)


def copy_bounded(source: int, target: int, limit: int = MAX_LOG_BYTES) -> None:
    """Copy from one file descriptor to another until the end, and discard what exceeds the limit.

    Args:
        limit: bytes; a last line says that there was more.
    """
    room = limit
    while data := os.read(source, 1 << 16):
        kept, was_full = data[: max(room, 0)], room < 0
        room -= len(data)
        if room < 0 and not was_full:
            kept += f"\n[more than {limit} bytes of output: the rest is discarded]\n".encode()
        with suppress(OSError):  # a full disk must not block the processes that print
            os.write(target, kept)


def _run_loader(end: socket.socket, job: ScorerJob, supervisor: int, output: int) -> None:
    """Keep one server running until the controller says no more. Never returns."""
    signal_on_parent_death(signal.SIGKILL, supervisor)
    adopt_orphans()
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)

    def load(channel: Channel) -> Scorer:
        with config_errors_sent(channel):
            return Scorer.load(job.reward, job.data)

    loader = os.getpid()
    with _exiting():
        if (importer := os.fork()) == 0:
            signal_on_parent_death(signal.SIGKILL, loader)
            adopt_orphans()
            scorer = load(_channel(end))
            if not _can_fork():
                sys.exit(IMPORT_IN_SERVERS)
            _keep_serving(lambda _: scorer, end)
        elif (exit_code := os.waitstatus_to_exitcode(wait_for(importer))) == IMPORT_IN_SERVERS:
            kill_descendants()
            _keep_serving(load, end)
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


def _channel(end: socket.socket) -> Channel:
    return WorkerChannel(end, msgspec.msgpack.Decoder(Score))


def _can_fork() -> bool:
    """Whether forks of this process can make calls: its threads are not in them, and CUDA does not work."""
    torch = sys.modules.get("torch")
    return threading.active_count() == 1 and not (torch and torch.cuda.is_initialized())


def _keep_serving(load: Load, end: socket.socket) -> None:
    """Keep one server running until the controller says no more.

    Args:
        load: called in each server.
    """
    parent, ended, channel = os.getpid(), "", _channel(end)
    started_by_import = children_of(parent)  # for instance a pool of processes that the calls use
    while not _is_finished(end):
        mine, theirs = socket.socketpair()
        with mine, theirs:
            if (server := os.fork()) == 0:
                mine.close()
                end.close()
                _serve(load, _channel(theirs), ended, parent)
            theirs.close()
            with suppress(OSError):  # the server does it too: the second attempt has no effect
                os.setpgid(server, server)
            has_served, status = _relay(channel, end, mine, server)
        exit_code = os.waitstatus_to_exitcode(status)
        if not has_served:
            sys.exit(_told(exit_code) or 1)
        ended = exit_cause(exit_code)
        kill_descendants(spare=started_by_import)


def _relay(channel: Channel, end: socket.socket, server_end: socket.socket, server: int) -> tuple[bool, int]:
    """Carry messages between the controller and a server until the server has ended.

    Returns:
        Whether it was ready for calls, and its status.
    """
    answers: WorkerChannel[FromScorer] = WorkerChannel(server_end, msgspec.msgpack.Decoder(FromScorer))
    has_served = False
    readable = select.poll()
    for each in (end, server_end):
        readable.register(each, select.POLLIN)
    while True:
        ready = dict(readable.poll(REAP_EVERY_MS))
        if server_end.fileno() in ready:
            try:
                found = answers.receive(wait=False)
            except msgspec.DecodeError:  # a call has written to it
                kill_group(server)
                found = None
            if found is None:
                return has_served, wait_for(server)
            for message in found:
                has_served |= isinstance(message, Serving)
                channel.send(message)
        if end.fileno() in ready:
            calls = channel.receive(wait=False)
            with suppress(OSError):  # the server has ended
                for call in calls or ():
                    answers.send(call)
                if calls is None:
                    readable.unregister(end)
                    server_end.shutdown(socket.SHUT_WR)
        if not ready and (status := status_of(server)) is not None:
            return has_served, status


def _serve(load: Load, channel: Channel, ended: str, parent: int) -> None:
    """Make one call after another until the controller says no more. Never returns."""
    with _exiting():
        os.setpgid(0, 0)
        signal_on_parent_death(signal.SIGKILL, parent)
        for each in (signal.SIGTERM, signal.SIGHUP):  # processes that a call starts can be terminated
            signal.signal(each, signal.SIG_DFL)
        scorer = load(channel)
        if not ended:
            channel.send(Ready())
        channel.send(Serving(os.getpid(), ended))
        for asked in channel:
            channel.send(Scored(asked.number, _outcome(scorer, asked.call)))


def _outcome(scorer: Scorer, call: Call) -> Scores | Failed:
    try:
        return scorer(call)
    except RewardFailed as failed:
        return Failed(failed.reason, failed.detail, failed.is_defect)


def _is_finished(end: socket.socket) -> bool:
    """Return whether the controller has said that there will be no more calls."""
    try:
        return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


if __name__ == "__main__":
    sys.exit(supervise(*begin(ScorerJob)))
