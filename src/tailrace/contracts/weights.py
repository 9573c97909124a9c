"""The contract between the trainer, which publishes weights, and the engines, which load them.

A publication reaches an engine in two halves that the controller runs together (`send_and_load`): the
trainer's process sends it, the engine's process receives it. A publication in files needs no sending. This
file imports no torch.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, Tag

from tailrace.errors import TransferFailed, WeightsRefused
from tailrace.memory import ITEM_BYTES
from tailrace.model_folder import read_config, tensor_shapes
from tailrace.settings import RunPath, Settings, default_tag

if TYPE_CHECKING:
    from torch import Tensor

DTYPE = Literal["float32", "bfloat16"]
KEPT_VERSIONS = 2
"""Publications that a sender keeps. Version n + 1 is written while engines may still read version n. Version
n + 2 is written only after every engine has loaded version n + 1. An engine that comes back late loads the
newest version."""
_NAMED = 3
"""Tensors that an error names, at most, of each kind of defect."""
_NOT_TRAINED = ".rotary_emb.inv_freq"
"""A buffer that old checkpoints contain; the model computes it."""


class ProbeSettings(Settings):
    """How publications are proven."""

    probe_every: int = Field(default=1, ge=0)
    """Every so many publications each engine proves that it has the new weights: by a checksum of each
    tensor, where it can read them, and by its log-probs of a fixed sequence, with its prefix cache and
    without. 0: never. The embedded engine can, and vLLM with `sampling.temperature = 1`."""


class SharedMemorySettings(ProbeSettings):
    """Trainer and engines on one host: files in shared memory."""

    transport: Literal["shared_memory"] = "shared_memory"
    """Selects this transport."""


class FilesystemSettings(ProbeSettings):
    """A complete Hugging Face folder for each version, which any server can read. The last two are kept."""

    transport: Literal["filesystem"] = "filesystem"
    """Selects this transport."""
    folder: RunPath | None = None
    """The folder that the versions are written to. It has the same path on all hosts, for example on NFS.
    Without it: `weights` in the run's folder."""
    shard_bytes: int = Field(default=5_000_000_000, ge=1)
    """Size of a safetensors file, at most, unless one tensor is larger."""


class ProcessGroupSettings(ProbeSettings):
    """A torch.distributed process group for each engine."""

    transport: Literal["process_group"] = "process_group"
    """Selects this transport."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: host memory and TCP. nccl: CUDA devices, not shared by trainer and engine."""
    host: str = "127.0.0.1"
    """The address of the trainer's host under which engines reach it. The trainer listens on it. There is no
    authentication: a network that others can reach is not safe."""
    bucket_bytes: int = Field(default=256 * 2**20, ge=1)
    """Size of one message, at most, unless one tensor is larger; at least 1."""
    message_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """Seconds that connecting, or one message, may take; above 0, at most 86,400. Less than
    `engine.health_timeout_s`: an engine that waits for the trainer does not answer."""


WeightsSettings = Annotated[
    Annotated[SharedMemorySettings, Tag("shared_memory")]
    | Annotated[FilesystemSettings, Tag("filesystem")]
    | Annotated[ProcessGroupSettings, Tag("process_group")],
    default_tag("shared_memory", "transport"),
]


def in_run_folder(settings: WeightsSettings, run_folder: Path) -> WeightsSettings:
    """Return the settings with a folder, where the transport needs one."""
    if isinstance(settings, FilesystemSettings) and settings.folder is None:
        return settings.model_copy(update={"folder": (run_folder / "weights").absolute()})
    return settings


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
    rank_offset: int = 1
    """Rank of the engine's first process."""

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
        return cls(parts.scheme, parts.hostname, parts.port, *sizes, int(query.get("rank_offset", 1)))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        sizes = f"bucket_bytes={self.bucket_bytes}&timeout_s={self.timeout_s:g}"
        return f"{self.backend}://{host}:{self.port}/?{sizes}&rank_offset={self.rank_offset}"


class Link(NamedTuple):
    """The connection between the trainer and one engine, which persists between transfers."""

    engine: str
    """Name of the engine, for messages."""
    number: int
    """Another number is another connection: after a failed transfer, or for another life of the engine."""
    num_ranks: int = 1
    """Processes of the engine that receive all tensors: tensor_parallel_size of an inference server."""
    standalone: bool = False
    """Whether it has an address of its own (process_group.py)."""


_link_numbers = itertools.count(1)


def new_link(engine: str, num_ranks: int = 1, *, standalone: bool = False) -> Link:
    """Return a link that no transfer has used."""
    return Link(engine, next(_link_numbers), num_ranks, standalone)


Send = Callable[[Weights, Link], Coroutine[Any, Any, None]]
"""The controller's way to the trainer's half. Raises TransferFailed."""


class WeightSender(Protocol):
    """The half of a transport that is in the trainer's process."""

    def store(self, tensors: "Mapping[str, Tensor]", version: int) -> Weights:
        """Make tensors available as a version. They may change after the call.

        The version can be sent until two newer ones are published, any number of times. Raises a
        TransferFailed if there is no room for them; it names where, and the remedy. `tensors`: on the CPU, by
        Hugging Face name; no two may share memory."""

    def send(self, version: int, link: Link) -> None:
        """Send a version to one engine. Any thread may call it, for several engines at the same time. Raises
        a TransferFailed if the engine did not take it, or the version is no longer kept."""

    def rendezvous(self, link: Link) -> Address:
        """Return where the two ends of a link meet. Any thread may call it."""
        raise TransferFailed(f'{link.engine} takes weights only by weights.transport = "process_group"')

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


def expected_tensors(model: Path, dtype: DTYPE) -> tuple[TensorInfo, ...]:
    """Return the tensors that a publication must have, from the headers of the served model's files. Raises a
    ConfigError if the folder is incomplete or damaged."""
    shapes = tensor_shapes(model)
    if read_config(model).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return tuple(
        TensorInfo(name, shape, dtype) for name, shape in shapes.items() if not name.endswith(_NOT_TRAINED)
    )


def check_tensors(offered: Iterable[TensorInfo], expected: Iterable[TensorInfo]) -> None:
    """Check that the offered tensors are the expected ones, in any order. Raises a WeightsRefused that names
    those that are missing, extra, of another shape or of another type."""
    have, want = ({tensor.name: tensor for tensor in tensors} for tensors in (offered, expected))
    both = [(have[name], want[name]) for name in want if name in have]
    defects = {
        "missing": [name for name in want if name not in have],
        "not in the model": [name for name in have if name not in want],
        "of another shape": [
            f"{a.name} {list(a.shape)} in place of {list(b.shape)}" for a, b in both if a.shape != b.shape
        ],
        "of another type": [
            f"{a.name} {a.dtype} in place of {b.dtype}" for a, b in both if a.dtype != b.dtype
        ],
    }
    found = [
        f"{len(names)} {defect}: {', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"
        for defect, names in defects.items()
        if names
    ]
    if found:
        raise WeightsRefused(f"the published weights are not those of the model; {'; '.join(found)}")
