"""The transports by their settings, and the engine's half of all of them.

This runs inside an inference server's environment too: it imports torch, safetensors, pydantic and msgspec,
and nothing of the package that needs more.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tailrace.contracts.weights import Link, TensorInfo, Weights, WeightSender
from tailrace.drivers.weights.filesystem import FilesystemSender
from tailrace.drivers.weights.manifest import check_tensors
from tailrace.drivers.weights.settings import FilesystemSettings
from tailrace.drivers.weights.tensors import manifest
from tailrace.errors import ConfigError, TransferFailed
from tailrace.kinds import kind_of
from tailrace.model_folder import weight_files


class SharedMemory:
    """A kind of transport. `sender` makes the trainer's half of these settings, model folder, adapter (as of
    FilesystemSender; None: none) and device. Raises a ConfigError if the transport cannot work here."""

    def sender(self, *_: Any) -> WeightSender:
        return FilesystemSender.in_shared_memory()


class Filesystem:
    """The transport by folders."""

    def sender(self, settings: FilesystemSettings, model: Path, adapter: Any, device: str) -> WeightSender:
        assert settings.folder is not None
        return FilesystemSender(settings.folder, model, settings.shard_bytes, adapter)


class WeightReceiver:
    """The engine's half of every transport. The location of a publication says which. Tensors arrive in the
    host's memory, or with NCCL on the device. `rank` of this process among those of the engine: 1 is the
    first."""

    def __init__(self, rank: int = 1, device: str = "cpu") -> None:
        self._rank, self._device = rank, device

    @cached_property
    def _process_group(self) -> Any:
        return kind_of("weights", "process_group").receiver(self._rank, self._device)

    def connect(self, location: str, link: Link) -> None:
        """Connect to the trainer over a link (`ProcessGroupReceiver.connect`)."""
        self._process_group.connect(location, link)

    def receive(self, weights: Weights, link: Link) -> dict[str, Tensor]:
        """Receive all tensors of a publication by name. Raises as `parts`."""
        return {name: tensor for part in self.parts(weights, link) for name, tensor in part.items()}

    def parts(self, weights: Weights, link: Link) -> Iterator[dict[str, Tensor]]:
        """Receive the tensors of a publication in parts, one of which is in memory at a time.

        A caller that stops between two parts must not use the link again.

        Raises:
            TransferFailed: the trainer cannot be reached, a file is missing or damaged; parts may have been
                received before.
            WeightsRefused: all parts were received, and are not those of the manifest.
        """
        if weights.is_streamed:
            yield from self._process_group.buckets(weights, link)
        else:
            yield from _file_parts(weights)


def _file_parts(weights: Weights) -> Iterator[dict[str, Tensor]]:
    """Read the tensors of each file. They stay valid after the file is removed."""
    location = Path(weights.location)
    found: list[TensorInfo] = []
    try:
        for file in weight_files(location) if location.is_dir() else [location]:
            part = load_file(file)
            found += manifest(part)
            yield part
    except (OSError, SafetensorError, ConfigError) as why:
        reason = f"{why.value}: {why.problem}" if isinstance(why, ConfigError) else f"{location}: {why}"
        raise TransferFailed(f"version {weights.version} of the weights cannot be read: {reason}") from why
    if weights.tensors:
        check_tensors(found, weights.tensors)
