"""The processes of one reward worker.

    supervisor      no user code: bounds the log, ends all other processes with the controller
    `-- loader      imports the reward function once; forks the next server in milliseconds
        `-- server  makes the calls; leads a process group, which the controller kills when a call is too slow

Supervisor and loader adopt orphans, so processes that a call started are found and killed even if they have
a session of their own: those of a call that was stopped by the loader, all others by the supervisor.
"""

import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress

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
    signal_on_parent_death,
)
from tailrace.workers.reward_messages import Failed, Score, Scored, Serving

MAX_LOG_BYTES = 10 * 2**20
"""Output of the reward function that is kept in the log; the rest is discarded."""
DRAIN_S = 2.0
"""Seconds in which the rest of the output is copied to the log at the end."""


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
    exit_code = os.waitstatus_to_exitcode(_wait_for(loader))
    kill_descendants()
    log.join(DRAIN_S)
    if exit_code < 0:
        print(f"the process that loads the reward function ended: {exit_cause(exit_code)}")
    return abs(exit_code)


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
    """Load the function and keep one server running until the controller says no more. Never returns."""
    signal_on_parent_death(signal.SIGKILL, supervisor)
    adopt_orphans()
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(Score))
    try:
        with config_errors_sent(channel):
            scorer = Scorer.load(job.reward, job.data)
        channel.send(Ready())
        _keep_serving(scorer, end, channel)
    except SystemExit as exit:
        os._exit(exit.code if isinstance(exit.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _keep_serving(scorer: Scorer, end: socket.socket, channel: WorkerChannel[Score]) -> None:
    loader, ended = os.getpid(), ""
    started_by_import = children_of(loader)  # for instance a pool of processes that the calls use
    while not _is_finished(end):
        server = os.fork()
        if server == 0:
            _serve(scorer, channel, ended, loader)
        with suppress(OSError):  # the server does it too: the second attempt has no effect
            os.setpgid(server, server)
        ended = exit_cause(os.waitstatus_to_exitcode(_wait_for(server)))
        kill_descendants(spare=started_by_import)


def _serve(scorer: Scorer, channel: WorkerChannel[Score], ended: str, loader: int) -> None:
    """Make one call after another until the controller says no more. Never returns."""
    try:
        os.setpgid(0, 0)
        signal_on_parent_death(signal.SIGKILL, loader)
        for each in (signal.SIGTERM, signal.SIGHUP):  # processes that a call starts can be terminated
            signal.signal(each, signal.SIG_DFL)
        channel.send(Serving(os.getpid(), ended))
        for asked in channel:
            channel.send(Scored(asked.number, _outcome(scorer, asked.call)))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


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


def _wait_for(child: int) -> int:
    """Return the status of a child once it has ended; reap adopted orphans meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


if __name__ == "__main__":
    sys.exit(supervise(*begin(ScorerJob)))
