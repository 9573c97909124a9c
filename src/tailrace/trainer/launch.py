"""The processes of one trainer: `ranks` for each of `replicas` copies of the model.

Ranks of one replica communicate in every forward and backward pass (fsdp.py), so they compute the same plan
of micro-batches (packing.py). Replicas communicate only in an optimizer step. A trainer of one process
does not communicate, and does not initialise torch.distributed.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tailrace.errors import CheckpointError
from tailrace.trainer.base import TrainerSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among those of the trainer."""

    rank: int = 0
    """Among those of the replica."""
    num_ranks: int = 1
    mesh: DeviceMesh | None = None
    """The ranks of the replica, over which the model is sharded; None: this process has the whole model."""
    replicas: ProcessGroup | None = None
    """The process of the same rank in every replica; None: there is one replica."""
    writers: ProcessGroup | None = None
    """The ranks of the replica once more, on Gloo: for the threads that write a checkpoint, because the
    collectives of two threads would mix in one group."""

    def sum_over_all(self, values: Tensor) -> None:
        """Add up values of all processes, in place."""
        if self.mesh or self.replicas:
            dist.all_reduce(values)

    def sum_over_ranks(self, values: Tensor) -> None:
        """Add up values of the ranks of this replica, in place."""
        if self.mesh:
            dist.all_reduce(values, group=self.mesh.get_group())

    def sum_over_replicas(self, values: Sequence[Tensor]) -> None:
        """Add up values of this rank in all replicas, in place."""
        if self.replicas:
            for work in [dist.all_reduce(each, group=self.replicas, async_op=True) for each in values]:
                work.wait()

    def together(self, work: Callable[[], T]) -> T:
        """Do work without collectives in every rank of the replica.

        Raises:
            CheckpointError: one of the ranks raised it. All ranks raise it, so that none waits for another.
        """
        failures: list[str | None] = [None] * self.num_ranks
        result = None
        try:
            result = work()
        except CheckpointError as error:
            if not self.mesh:
                raise
            failures[self.rank] = str(error)
        if self.mesh:
            dist.all_gather_object(failures, failures[self.rank], group=self.mesh.get_group())
        if failure := next((each for each in failures if each), None):
            raise CheckpointError(failure)
        return result  # type: ignore[return-value]


def listen(host: str) -> TCPStore:
    """Open the store through which all processes find one another, in one of them.

    Args:
        host: an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


@contextmanager
def joined(settings: TrainerSettings, store: TCPStore, *, replica: int, rank: int) -> Iterator[Ranks]:
    """Join the processes of a trainer inside the block. All of them call it.

    Args:
        store: of `listen`, or a client of it.
        replica, rank: of this process.
    """
    timeout = timedelta(seconds=settings.collective_timeout_s)
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # torch refuses a device without a number here
    if store.host in ("127.0.0.1", "::1"):  # Gloo otherwise listens where the host's name points
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    shape = settings.replicas, settings.ranks
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=replica * settings.ranks + rank,
        world_size=settings.replicas * settings.ranks,
        timeout=timeout,
    )
    try:
        numbers = torch.arange(settings.replicas * settings.ranks).view(shape)
        new_groups: Any = dist.new_subgroups_by_enumeration
        replica_ranks, _ = new_groups(numbers.tolist(), timeout=timeout)
        same_rank, _ = new_groups(numbers.T.tolist(), timeout=timeout)
        writers, _ = new_groups(numbers.tolist(), timeout=timeout, backend="gloo")
        sharded = settings.ranks > 1 or settings.cpu_offload
        mesh = DeviceMesh.from_group(replica_ranks, device.type) if sharded else None
        replicas = same_rank if settings.replicas > 1 else None
        yield Ranks(rank, settings.ranks, mesh, replicas, writers if mesh else None)
    finally:
        dist.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process has ended or did not take part in time."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
