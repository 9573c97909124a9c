"""A worker process that behaves as its job says: python -m stand_in."""

import sys
import time
from typing import Literal

import msgspec

from tailrace.workers.channel import WorkerChannel
from tailrace.workers.child import begin, end_with_controller
from tailrace.workers.messages import Done, Job, Ready


class Obey(msgspec.Struct, tag=True):
    """Answered by Done."""


class StandInJob(Job):
    manner: Literal["start for ever", "obey", "raise", "work for ever", "stay", "babble"]


def main() -> None:
    if "start for ever" in sys.argv[2]:
        time.sleep(1000)
    end, job = begin(StandInJob)
    end_with_controller(end)
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(Obey))
    channel.send(Ready())
    for _ in channel:
        print("was asked to obey")
        if job.manner == "raise":
            raise ValueError("the model melted")
        if job.manner == "babble":
            end.sendall(b"\x01\x00\x00\x00\xc1")
        while job.manner == "work for ever":
            sum(range(1000))
        channel.send(Done())
    while job.manner == "stay":
        time.sleep(1)


if __name__ == "__main__":
    main()
