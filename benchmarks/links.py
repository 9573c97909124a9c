"""Hosts with links of a rate on one machine: network namespaces behind a bridge. Needs root, `ip` and `tc`.

The trainer stays on the machine, at `TRAINER`. Each engine's process moves into a namespace of its own before
it loads its model. What leaves the trainer, or an engine, is held to the rate (a token bucket filter)."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import override

from tailrace.drivers.workers.engine import EngineJob, EngineWorker
from tailrace.drivers.workers.worker import WorkerConnection

BRIDGE, TRAINER = "tailrace", "10.77.0.1"
CLONE_NEWNET = 0x40000000


def namespace(number: int) -> str:
    return f"{BRIDGE}-{number}"


@contextmanager
def linked_hosts(num: int, mbit: float) -> Iterator[None]:
    """Make a host for each of so many engines, and remove them with the block."""
    # A short queue: acknowledgements wait behind the data that an engine passes on.
    shaped = f"root tbf rate {mbit:g}mbit burst 128kb latency 30ms"
    commands = [
        f"ip link add {BRIDGE} type bridge",
        f"ip addr add {TRAINER}/24 dev {BRIDGE}",
        f"ip link set {BRIDGE} up",
        f"tc qdisc add dev {BRIDGE} {shaped}",
    ]
    for number in range(num):
        name, outer, inner = namespace(number), f"tailout{number}", f"tailin{number}"
        commands += [
            f"ip netns add {name}",
            f"ip link add {outer} type veth peer name {inner}",
            f"ip link set {outer} master {BRIDGE} up",
            f"ip link set {inner} netns {name}",
            f"ip -n {name} addr add 10.77.0.{2 + number}/24 dev {inner}",
            f"ip -n {name} link set {inner} up",
            f"ip -n {name} link set lo up",
            f"ip netns exec {name} tc qdisc add dev {inner} {shaped}",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield
    finally:
        for command in [f"ip netns del {namespace(n)}" for n in range(num)] + [f"ip link del {BRIDGE}"]:
            with suppress(subprocess.CalledProcessError):
                subprocess.run(command.split(), check=True, capture_output=True)


class LinkedEngineJob(EngineJob):
    """Serve a model on the host of a number."""

    host: int


class LinkedEngineWorker(EngineWorker):
    """An engine that moves to its host before it loads its model."""

    job_type = LinkedEngineJob  # type: ignore[assignment]

    @override
    @classmethod
    def load_job(cls, job: LinkedEngineJob, connection: WorkerConnection) -> EngineWorker:  # type: ignore[override]
        descriptor = os.open(Path("/var/run/netns") / namespace(job.host), os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        return super().load_job(job, connection)
