"""Tensors, and processes that send or receive them."""

import hashlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tailrace.contracts.weights import Link, TensorInfo, Weights
from tailrace.drivers.weights.process_group import ProcessGroupSender
from tailrace.drivers.weights.settings import ProcessGroupSettings
from tailrace.drivers.weights.transports import WeightReceiver

DEADLINE_S = 60.0
SETTINGS = ProcessGroupSettings(bucket_bytes=1000, message_timeout_s=20)
BRISK = ProcessGroupSettings(bucket_bytes=1000, message_timeout_s=5)
HASTY = ProcessGroupSettings(bucket_bytes=2**20, message_timeout_s=0.5)

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(["torch", "tailrace.drivers.weights.transports"])


def some_tensors(seed: int) -> dict[str, Tensor]:
    """Tensors of both types and all kinds of shapes; the third is not contiguous, the last is a large one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"scalar": (), "empty": (0, 3), "matrix": (5, 7), "odd": (3,), "large": (40, 30)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"matrix": tensors["matrix"].T, "odd": tensors["odd"].bfloat16()}


def many_megabytes() -> dict[str, Tensor]:
    """More than the buffers of a connection hold."""
    return {f"{n}": torch.full((2**18,), float(n)) for n in range(64)}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Names, shapes, types and bits."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {list(tensor.shape)} {tensor.dtype};".encode())
        whole.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run target(*arguments, connection) in a process, and end it with the block."""
    mine, theirs = _forkserver.Pipe()
    started = _forkserver.Process(target=target, args=(*arguments, theirs), daemon=True)
    started.start()
    try:
        yield started, mine
    finally:
        started.kill()
        started.join()


def answer(connection: Connection) -> Any:
    assert connection.poll(DEADLINE_S)
    return connection.recv()


def receive_all(rank: int, connection: Connection) -> None:
    """Answer each (weights, link) with the digest of what arrives."""
    receiver = WeightReceiver(rank)
    while True:
        weights, link = connection.recv()
        connection.send(digest(receiver.receive(weights, link)))


def receive_one_part_and(number: signal.Signals, weights: Weights, link: Link, _: Connection) -> None:
    """Send a signal to itself between two parts."""
    for _ in WeightReceiver().parts(weights, link):
        os.kill(os.getpid(), number)


def send_many_megabytes(link: Link, connection: Connection) -> None:
    sender = ProcessGroupSender(BRISK)
    connection.send(sender.store(many_megabytes(), 1))
    sender.send(1, link)


def receive_with_torch(
    port: int, tensors: Sequence[TensorInfo], rank: int, world_size: int, connection: Connection
) -> None:
    """An engine without this package: answer with the digest of what rank 0 broadcasts."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    received = {each.name: torch.empty(each.shape, dtype=getattr(torch, each.dtype)) for each in tensors}
    for tensor in received.values():
        dist.broadcast(tensor, 0)
    connection.send(digest(received))


def broadcast_with_torch(world_size: int, connection: Connection) -> None:
    """A trainer without this package: answer with its port, take tensors, and broadcast each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    connection.send(port)
    tensors = connection.recv()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=world_size)
    for tensor in tensors.values():
        dist.broadcast(tensor.contiguous(), 0)
    connection.recv()  # until it is killed: peers may still read
