"""Weight transport by torch.distributed: a process group over the engines of a transfer, and the trainer as
rank 0.

The location of a publication is the address of the trainer:

    BACKEND://HOST:PORT/?bucket_bytes=N&timeout_s=S

HOST:PORT is a TCPStore in the trainer's process. A link (contracts/weights.py) is a group of 1 + num_ranks
processes that rendezvous under the prefix "ENGINES/NUMBER/" of that store and stay connected between
transfers. A transfer is one broadcast from rank 0 for each bucket, as uint8; nothing else is sent. With NCCL
the buckets go from device to device. Gloo's own broadcast sends the whole message several times from rank 0
(a binomial tree), so the buckets go in pieces from each rank to the next, which all links carry at the same
time. After any error each end aborts the group, which the others notice, and the next transfer uses a link
with another number.

The groups are made from the backends' classes, not by init_process_group: that has one default group in a
process, which belongs to the ranks of a trainer.

A bucket is the bytes of its tensors one after another, in the order of the manifest, each tensor contiguous
and in native byte order, without padding and without a header. A tensor joins the bucket before it unless
the bucket would then be larger than `bucket_bytes`; so a larger tensor is a bucket of its own. Sender and
receiver compute the same buckets from the manifest.

A standalone link has a store, and so an address, of its own, with `bucket_bytes=0`. Its group is the one that
`torch.distributed.init_process_group` makes at tcp://HOST:PORT, and a transfer is one broadcast from rank 0
for each tensor, in its own shape and type. So its other ends need not be of this package.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from typing_extensions import override

from tailrace.contracts.weights import KEPT_VERSIONS, Address, Link, TensorInfo, Weights, WeightSender
from tailrace.drivers.weights.settings import ProcessGroupSettings
from tailrace.drivers.weights.tensors import manifest
from tailrace.errors import ConfigError, NotJoined, TransferFailed

Bucket = Sequence[TensorInfo]


def buckets(tensors: Iterable[TensorInfo], bucket_bytes: int) -> list[list[TensorInfo]]:
    """Divide a manifest into buckets."""
    divided: list[list[TensorInfo]] = []
    room = -1
    for tensor in tensors:
        if tensor.num_bytes > room:
            divided.append([])
            room = bucket_bytes
        divided[-1].append(tensor)
        room -= tensor.num_bytes
    return divided


def pack(tensors: Mapping[str, Tensor], bucket: Bucket) -> Tensor:
    """Copy the tensors of a bucket: [num_bytes], uint8."""
    return torch.cat([tensors[info.name].contiguous().reshape(-1).view(torch.uint8) for info in bucket])


def unpack(data: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    """Return the tensors of a bucket, [num_bytes] uint8, by name: views where its alignment allows it."""
    tensors: dict[str, Tensor] = {}
    sizes = [info.num_bytes for info in bucket]
    for info, part in zip(bucket, data.split_with_sizes(sizes), strict=True):
        dtype: torch.dtype = getattr(torch, info.dtype)
        aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
        tensors[info.name] = aligned.view(dtype).view(info.shape)
    return tensors


_CLASSES: Mapping[str, str] = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Environment variables that a group of NCCL reads when it is made. By default torch ends the process of a
group that fails. Groups that were made before, such as those of a trainer's ranks, keep that default."""


LISTENS_S = 5.0
"""Seconds after which the store of a standalone link must listen, at most."""


PIECE_BYTES = 2**19
"""Size of what a rank takes from the one before and passes on, with Gloo."""
_GIVEN_UP = "given up"


class TransferGroup:
    """One process of a link. The constructor waits for the others.

    Args:
        device: of this process; Gloo does not use it.

    Raises:
        NotJoined: this is the trainer, and others did not come within the time limit.
        RuntimeError: the trainer gave the link up, or did not come.
        OSError: the trainer cannot be reached.
    """

    def __init__(self, address: Address, link: Link, rank: int, device: str) -> None:
        self._timeout = timeout = timedelta(seconds=address.timeout_s)
        self._device = torch.device("cpu" if address.backend == "gloo" else device)
        # On the default stream a transfer would wait for the computation, and the computation for the peer.
        stream: Any = torch.cuda.Stream
        self._stream = stream(self._device) if self._device.type == "cuda" else None
        own_host = _own_host(address)
        self._rank, self._size = rank, (size := 1 + link.num_ranks)
        self._passes_on = address.backend == "gloo" and not address.is_standalone
        store = TCPStore(address.host, address.port, size, is_master=False, timeout=timeout)
        if address.is_standalone:
            device_key = "cpu" if address.backend == "gloo" else "cuda"
            prefix = PrefixStore(f"{device_key}/", PrefixStore("0/", PrefixStore("default_pg", store)))
        else:
            prefix = PrefixStore(f"{link.names}/{link.number}", store)
            _meet(prefix, rank, size, address.timeout_s)
        if address.backend == "nccl":
            os.environ.update(_NCCL)
        kind: Any = getattr(dist, _CLASSES[address.backend])
        options = (getattr(kind, "_Options", None) or kind.Options)()
        options._timeout = timeout
        if hasattr(kind, "create_device"):
            # Gloo listens on the way to the trainer only: on loopback, where both are on one host.
            options._devices = [kind.create_device(hostname=own_host)]
        self._group = kind(prefix, rank, size, options)

    def send(self, data: Tensor) -> None:
        """Send one message. Raises a RuntimeError if a peer has ended, or did not take part within the time
        limit."""
        with torch.cuda.stream(self._stream):
            self._broadcast(data.to(self._device))

    def receive(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Receive a message of a type: [num_bytes], uint8, on the device. Raises as `send`."""
        with torch.cuda.stream(self._stream):
            data = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=self._device)
            self._broadcast(data)
        if self._stream:
            reader = torch.cuda.current_stream(self._device)
            reader.wait_stream(self._stream)
            data.record_stream(reader)
        return data.view(torch.uint8)

    def has_room(self, num_bytes: int) -> bool:
        """Whether the memory of the device has room for so many bytes beside what it has."""
        return self._stream is None or torch.cuda.mem_get_info(self._device)[0] > 1.1 * num_bytes

    def abort(self) -> None:
        """End the group, and whatever it or a peer waits for."""
        self._group.abort()

    def _broadcast(self, data: Tensor) -> None:
        if self._passes_on:
            self._pass_on(torch.split(data, PIECE_BYTES))
        else:
            # Without a limit NCCL's `wait` returns at once, and no error is ever raised.
            self._group.broadcast(data, 0).wait(self._timeout)

    def _pass_on(self, pieces: Sequence[Tensor]) -> None:
        """Take pieces from the rank before and give them to the next; the trainer has them."""
        group, before, after = self._group, self._rank - 1, self._rank + 1
        taken = [group.recv([piece], before, tag) for tag, piece in enumerate(pieces) if self._rank]
        given = []
        for tag, piece in enumerate(pieces):
            if taken:
                taken[tag].wait(self._timeout)
            if after < self._size:
                given.append(group.send([piece], after, tag))
        for each in given:
            each.wait(self._timeout)


def _meet(store: PrefixStore, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all ranks have come: NCCL would wait without a limit for one that does not. The trainer
    (rank 0) decides when it is too late; the others wait longer, for a trainer that does not decide."""
    store.set(f"rank {rank}", "")
    give_up_s = time.monotonic() + timeout_s * (2 if rank else 1)
    while missing := [each for each in range(size) if not store.check([f"rank {each}"])]:
        if store.check([_GIVEN_UP]):
            raise RuntimeError("the transfer was given up")
        if time.monotonic() >= give_up_s:
            words = f"rank {', '.join(map(str, missing))} did not come within {timeout_s:g} s"
            if rank:
                raise RuntimeError(f"timeout: {words}")
            store.set(_GIVEN_UP, "")
            raise NotJoined(f"{words} (weights.message_timeout_s)", *missing)
        time.sleep(0.002)


def _own_host(address: Address) -> str:
    """The address of this machine on the way to the trainer. Another trainer may open its store only after it
    has asked for the group."""
    give_up_s = time.monotonic() + min(LISTENS_S, address.timeout_s) * address.is_standalone
    while True:
        try:
            with socket.create_connection((address.host, address.port), address.timeout_s) as route:
                return str(route.getsockname()[0])
        except ConnectionRefusedError:
            if time.monotonic() >= give_up_s:
                raise
            time.sleep(0.05)


class _Connections:
    """The groups of one process, which stay connected between transfers. An engine is in one of them."""

    def __init__(self, rank: int, device: str) -> None:
        self._rank, self._device = rank, device
        self._groups: dict[Link, tuple[Address, TransferGroup]] = {}
        """Groups that no transfer uses."""
        self.in_use: dict[Link, TransferGroup] = {}
        self._lock = threading.Lock()

    @contextmanager
    def group(self, address: Address, link: Link) -> Iterator[TransferGroup]:
        """Yield the group of a link. It is aborted if the block does not come to its end, or when one of its
        engines has another link."""
        with self._lock:
            joined = [each for each in self._groups if set(each.engines) & set(link.engines)]
            last = [(each, *self._groups.pop(each)) for each in joined]
        group = None
        for each, at, old in last:
            if (each, at) == (link, address):
                group = old
            else:
                old.abort()
        if group is None:
            rank = self._rank + link.first_rank - 1 if self._rank else 0
            group = TransferGroup(address, link, rank, self._device)
        self.in_use[link] = group
        try:
            yield group
        except BaseException:
            group.abort()
            raise
        finally:
            del self.in_use[link]
        with self._lock:
            self._groups[link] = (address, group)

    def clear(self) -> None:
        """Drop all groups."""
        with self._lock:
            self._groups.clear()


class ProcessGroupSender(WeightSender):
    """Keeps the last KEPT_VERSIONS in the host's memory, with NCCL the newest on the device, and sends them.
    Raises a ConfigError if this machine cannot listen on the address, or torch lacks the backend."""

    def __init__(self, settings: ProcessGroupSettings, device: str = "cpu") -> None:
        self._connections = _Connections(0, device)
        if not getattr(dist, f"is_{settings.backend}_available")():
            problem = "this torch was built without it"
            raise ConfigError("weights.backend", settings.backend, problem, 'write "gloo"')
        self._settings = settings
        self.device = device if settings.backend == "nccl" else "cpu"
        self._address, self._store = self._listen(settings.bucket_bytes)
        self._standalone: dict[tuple[str, ...], tuple[int, Address, TCPStore]] = {}
        """The last link of standalone engines, by its engines."""
        self._kept: dict[int, list[tuple[list[TensorInfo], Tensor]]] = {}
        """The buckets of the kept versions, the oldest first."""
        self._lock = threading.Lock()

    def _listen(self, bucket_bytes: int) -> tuple[Address, TCPStore]:
        """Open a store on a free port of this machine."""
        settings = self._settings
        try:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            listening = socket.create_server((settings.host, 0), family=family)
        except OSError as why:
            problem = f"this machine cannot listen on it ({why})"
            raise ConfigError("weights.host", settings.host, problem, "write an address of it") from why
        port = listening.getsockname()[1]
        store = TCPStore(
            settings.host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return Address(settings.backend, settings.host, port, bucket_bytes, settings.message_timeout_s), store

    @override
    def store(self, tensors: Mapping[str, Tensor], version: int) -> Weights:
        infos = manifest(tensors)
        with self._lock:  # the device has room for the newest one
            for kept in self._kept.values():
                kept[:] = [(each, data.cpu()) for each, data in kept]
        packed = [(each, pack(tensors, each)) for each in buckets(infos, self._address.bucket_bytes)]
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)  # another stream sends them
        with self._lock:
            self._kept.pop(version, None)
            self._kept[version] = packed
            while len(self._kept) > KEPT_VERSIONS:
                del self._kept[next(iter(self._kept))]
        return Weights(version, str(self._address), infos)

    @override
    def send(self, version: int, link: Link) -> None:
        with self._lock:
            packed = [*self._kept[version]] if version in self._kept else None
        problem = f"{link.names} did not take version {version} of the weights"
        address = self.rendezvous(link)
        with _failures(problem), self._connections.group(address, link) as group:
            if packed is None:
                raise TransferFailed(f"version {version} of the weights is no longer kept for {link.names}")
            for bucket, data in packed:
                for message in unpack(data, bucket).values() if link.standalone else [data]:
                    group.send(message)

    @override
    def give_up(self, link: Link) -> None:
        PrefixStore(f"{link.names}/{link.number}", self._store).set(_GIVEN_UP, "")
        if group := self._connections.in_use.get(link):
            group.abort()
        with self._lock:
            self._standalone.pop(link.engines, None)

    @override
    def rendezvous(self, link: Link) -> Address:
        if not link.standalone:
            return self._address
        with self._lock:
            kept = self._standalone.get(link.engines)
            if kept is None or kept[0] != link.number:
                try:
                    kept = self._standalone[link.engines] = (link.number, *self._listen(0))
                except RuntimeError as why:
                    raise TransferFailed(f"{link.names}: the trainer cannot listen: {why}") from why
            return kept[1]

    @override
    def close(self) -> None:
        self._connections.clear()
        with self._lock:
            self._kept.clear()
            self._standalone.clear()


class ProcessGroupReceiver:
    """The engine's end of one link after another. `rank` and `device` are those of this process."""

    def __init__(self, rank: int = 1, device: str = "cpu") -> None:
        self._connections = _Connections(rank, device)

    def connect(self, location: str, link: Link) -> None:
        """Make the group of a link. Raises TransferFailed if the trainer does not come in time."""
        what = f"the process group at {location} was not made"
        with _failures(what), self._connections.group(Address.parse(location), link):
            pass

    def buckets(self, weights: Weights, link: Link) -> Iterator[dict[str, Tensor]]:
        """Receive the tensors of a publication, a bucket at a time: in the memory of the device if NCCL is
        used and all of them fit there, else in that of the host. Raises a TransferFailed if the trainer has
        ended, or did not send within the time limit."""
        with _failures(f"the trainer at {weights.location} did not send version {weights.version}"):
            address = Address.parse(weights.location)
            with self._connections.group(address, link) as group:
                fits = group.has_room(weights.num_bytes)
                for bucket in buckets(weights.tensors, address.bucket_bytes):
                    dtype = getattr(torch, bucket[0].dtype) if address.is_standalone else torch.uint8
                    size = sum(tensor.num_bytes for tensor in bucket)
                    data = group.receive(size, dtype)
                    yield unpack(data if fits else data.cpu(), bucket)


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turn the errors of sockets and of torch.distributed into TransferFailed."""
    try:
        yield
    except NotJoined as why:
        raise NotJoined(f"{what}: {why}", *why.ranks) from why
    except (RuntimeError, OSError, ValueError) as why:
        reason = re.sub(r"^\[\S+\] ", "", str(why))  # without the file and line of the library
        reason = re.split(r"\n|\. ", reason)[0]
        raise TransferFailed(f"{what}: {reason}") from why


class ProcessGroup:
    """The transport by process groups."""

    def sender(self, settings: ProcessGroupSettings, model: Path, adapter: Any, device: str) -> WeightSender:
        return ProcessGroupSender(settings, device)

    def receiver(self, rank: int, device: str) -> "ProcessGroupReceiver":
        """Make an engine's half. Arguments as `WeightReceiver`."""
        return ProcessGroupReceiver(rank, device)
