"""The scorer's process: loads the reward function once, and forks a process that makes the calls.

A call may hang for ever or take its process down, and loading the function may take seconds. So the
controller kills the fork, and this process, which has no threads and holds the function loaded,
forks the next one in milliseconds. It also ends the fork when the controller is gone, even where the
function holds the interpreter's lock.
"""

import os
import select
import socket
import traceback
from contextlib import suppress

import msgspec

from tailrace.errors import RewardFailed
from tailrace.reward.functions import Scorer
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.child import begin, config_errors_sent
from tailrace.workers.exits import exit_cause, kill_group
from tailrace.workers.messages import Call, Failed, Score, Scored, ScorerJob, Serving, ToScorer

_NO_MORE_CALLS = b"."


def serve(scorer: Scorer, channel: WorkerChannel[Score]) -> None:
    """Make one call after another until the controller says no more."""
    for asked in channel:
        channel.send(Scored(asked.number, [_outcome(scorer, call) for call in asked.calls]))


def _outcome(scorer: Scorer, call: Call) -> float | Failed:
    try:
        return scorer(call.prompt, call.completion, call.row)
    except RewardFailed as failed:
        return Failed(failed.reason, failed.detail)


def supervise(scorer: Scorer, end: socket.socket, channel: WorkerChannel[Score]) -> None:
    """Keep one fork serving until the controller says no more, or is gone."""
    ended = ""
    while True:
        alive, held_by_fork = os.pipe()
        pid = os.fork()
        if pid == 0:
            _serve_in_fork(scorer, channel, ended, held_by_fork)
        os.close(held_by_fork)
        with suppress(OSError):  # the fork does it too: whoever comes second has nothing to do
            os.setpgid(pid, pid)
        over = _is_over(end, alive)
        os.close(alive)
        kill_group(pid)
        _, status = os.waitpid(pid, 0)
        ended = exit_cause(os.waitstatus_to_exitcode(status))
        if over:
            return


def _serve_in_fork(scorer: Scorer, channel: WorkerChannel[Score], ended: str, alive: int) -> None:
    """Never returns. Leads its own process group, so that what a call started ends with it."""
    try:
        os.setpgid(0, 0)
        channel.send(Serving(os.getpid(), ended))
        serve(scorer, channel)
        os.write(alive, _NO_MORE_CALLS)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _is_over(end: socket.socket, alive: int) -> bool:
    """Wait until the controller is gone or the fork has ended; False if the fork is to be replaced."""
    poll = select.poll()
    poll.register(end, 0)
    poll.register(alive, select.POLLIN)
    ready = dict(poll.poll())
    return end.fileno() in ready or os.read(alive, 1) == _NO_MORE_CALLS


def main() -> None:
    end, job = begin(ScorerJob)
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(ToScorer))
    with config_errors_sent(channel):
        scorer = Scorer.load(job.reward, job.data)
    supervise(scorer, end, channel)


if __name__ == "__main__":
    main()
