"""The contract between the trainer, which publishes weights, and the engines, which load them.

A publication reaches an engine in two halves that the controller runs together (`send_and_load`): the
trainer's process sends it, the engine's process receives it. A publication in files needs no sending. This
file imports no torch.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

from tailrace.errors import TransferFailed
from tailrace.types import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor

DTYPE = Literal["float32", "bfloat16"]
KEPT_VERSIONS = 2
"""Publications that a sender keeps. Version n + 1 is written while engines may still read version n. Version
n + 2 is written only after every engine has loaded version n + 1. An engine that comes back late loads the
newest version."""


class TensorInfo(NamedTuple):
    """One tensor of a publication."""

    name: str
    """The name in the Hugging Face folder."""
    shape: tuple[int, ...]
    dtype: DTYPE

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's elements."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed sequence whose log-probs prove that an engine has a publication (drivers/engine/proof.py).

    Args:
        ids: the fixed sequence.
        num_prefix: tokens that are not scored; the prefix cache may have them.
        initial: [len(ids) - num_prefix], the trainer's log-probs at the sampling temperature before its first
            step.
        expected: the same under this publication; empty: it need not be proven.
        checksums: of the published tensors, by name (tensors.py).
    """

    ids: tuple[int, ...]
    num_prefix: int
    initial: tuple[float, ...]
    expected: tuple[float, ...]
    checksums: dict[str, int]


@dataclass(frozen=True, slots=True)
class Weights:
    """A reference to one published version of the policy's weights."""

    version: int
    """Number of the publication; 0 is the initial model."""
    location: str = ""
    """Path of a safetensors file or of a Hugging Face folder, or address of a process group."""
    tensors: tuple[TensorInfo, ...] = ()
    """The manifest, in the order in which tensors are sent. Empty: the files say it themselves."""
    changed: float | None = None
    """Share of the weights whose bfloat16 value is not that of the previous publication (tensors.py)."""
    probe: Probe | None = None
    """Question to the engine; None: no publication of the run is checked."""

    @property
    def is_streamed(self) -> bool:
        """Whether the trainer's process must send the tensors. Otherwise they are in files."""
        return "://" in self.location

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class Address(NamedTuple):
    """The location of a streamed publication (process_group.py)."""

    backend: str
    host: str
    port: int
    bucket_bytes: int
    """0: of a standalone link."""
    timeout_s: float

    @property
    def is_standalone(self) -> bool:
        return self.bucket_bytes == 0

    @classmethod
    def parse(cls, location: str) -> "Address":
        """Read a location. Raises a ValueError if it is none."""
        parts = urlsplit(location)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if parts.scheme not in ("gloo", "nccl") or parts.hostname is None or parts.port is None:
            raise ValueError(f"{location!r} is not the address of a process group")
        sizes = int(query.get("bucket_bytes", 0)), float(query.get("timeout_s", 0))
        return cls(parts.scheme, parts.hostname, parts.port, *sizes)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        sizes = f"bucket_bytes={self.bucket_bytes}&timeout_s={self.timeout_s:g}"
        return f"{self.backend}://{host}:{self.port}/?{sizes}"


class Link(NamedTuple):
    """The connection between the trainer and the engines of a transfer, which persists between transfers."""

    engines: tuple[str, ...]
    """Names of the engines."""
    number: int
    """Another number is another connection: after a failed transfer, or for another process of an engine."""
    num_ranks: int = 1
    """Processes that receive all tensors: the sum of the engines' tensor-parallel sizes."""
    standalone: bool = False
    """Whether it has an address of its own (process_group.py)."""
    first_rank: int = 1
    """Rank of the first process of the engine that has this end."""

    @property
    def names(self) -> str:
        """The engines, for messages."""
        return ", ".join(self.engines)


_link_numbers = itertools.count(1)


def new_link(*engines: str, num_ranks: int = 1, standalone: bool = False) -> Link:
    """Return a link that no transfer has used. `num_ranks`: of all engines."""
    return Link(engines, next(_link_numbers), num_ranks, standalone)


Send = Callable[[Weights, Link], Coroutine[Any, Any, None]]
"""The controller's way to the trainer's half. Raises TransferFailed."""


class WeightSender(Protocol):
    """The half of a transport that is in the trainer's process."""

    device: str = "cpu"
    """The device on which `store` takes tensors."""

    def store(self, tensors: "Mapping[str, Tensor]", version: int) -> Weights:
        """Make tensors available as a version. They may change after the call.

        The version can be sent until two newer ones are published, any number of times. Raises a
        TransferFailed if there is no room for them; it names where, and the remedy. `tensors`: on `device`,
        by Hugging Face name; no two may share memory."""

    def send(self, version: int, link: Link) -> None:
        """Send a version to the engines of a link. Any thread may call it, for several links at a time.

        Raises a TransferFailed if one of them did not take it, or the version is no longer kept; NotJoined if
        one did not come."""

    def give_up(self, link: Link) -> None:
        """End what a transfer over a link waits for. Any thread may call it."""
        return

    def rendezvous(self, link: Link) -> Address:
        """Return where the two ends of a link meet. Any thread may call it."""
        raise TransferFailed(f'{link.names} takes weights only by weights.transport = "process_group"')

    def close(self) -> None:
        """Remove what only a living trainer may leave behind. Any thread may call it."""


async def send_and_load(sending: Coroutine[Any, Any, None], loading: Awaitable[None]) -> None:
    """Run the trainer's and the engine's half of a transfer together, until both are done. Raises a
    TransferFailed if either half failed; the engine's error comes first."""
    task = asyncio.ensure_future(sending)
    try:
        await loading
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
