"""Weights from the trainer to the engines of one host: safetensors files in shared memory.

A version is one file, written under another name and renamed, so a reader sees all of it or nothing.
The last two versions are kept: an engine may still be reading the one before the newest. Tensors that were
read are the reader's own.

The trainer waits while a small model is written, and the engine while it is read. So all tensors of a type
lie in the file as one, because each tensor of a file costs more than its bytes; and a version is written
over the oldest one, because memory that a file has costs much less than memory that it must be given.
"""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailrace.weights.base import Weights

KEPT_VERSIONS = 2
_PREFIX, _LOCK = "tailrace-", "lock"
_LAYOUT = "layout"
"""Of the file's metadata: name, type and shape of each tensor, in their order."""
_LENGTH = struct.Struct("<Q")
"""Of the header that a safetensors file begins with."""


def shared_memory() -> Path:
    """Where files live in memory: /dev/shm if the host has it, else the folder for temporary files."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def own_folder() -> Iterator[Path]:
    """A new folder in shared memory, removed with the block. A run that is killed whole leaves its own,
    weights and all: what such runs left is removed first."""
    memory = shared_memory()
    for lock in memory.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(Timeout), FileLock(lock).acquire(timeout=0):  # Timeout: its owner lives
            shutil.rmtree(lock.parent, ignore_errors=True)
    unlocked = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}", dir=memory))
    with FileLock(unlocked / _LOCK):
        folder = unlocked.rename(memory / unlocked.name.removeprefix("new-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class SharedWeights:
    """The published versions of one run, in a folder that it makes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[Path, dict[str, Tensor]] = {}
        """The tensors of each version as they lie in its file, the oldest version first."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, tensors: Mapping[str, Tensor], version: int) -> Weights:
        """Put a version where `read` finds it, over the oldest one kept.

        Args:
            tensors: by name, no two sharing memory.
        """
        file = self._folder / f"{version}.safetensors"
        partial = file.with_suffix(".partial")
        places: dict[str, Tensor] = {}
        if len(self._kept) == KEPT_VERSIONS:
            oldest = next(iter(self._kept))
            places = self._kept.pop(oldest)
            oldest.rename(partial)
        if _layout(places) != _layout(tensors):
            places = _places(partial, tensors)
        for name, tensor in tensors.items():
            places[name].copy_(tensor)
        partial.rename(file)
        self._kept.pop(file, None)  # the same version, written again
        self._kept[file] = places
        return Weights(version, str(file))


def read(weights: Weights) -> dict[str, Tensor]:
    """The tensors of a published version, or of a checkpoint's file, on the CPU, by name.

    Raises:
        FileNotFoundError: two newer versions were published since.
    """
    with safe_open(weights.location, "pt") as file:
        metadata = file.metadata() or {}
        if _LAYOUT not in metadata:
            plain: dict[str, Tensor] = load_file(weights.location)
            return plain
        joined = {dtype: file.get_tensor(dtype).clone() for dtype in file.keys()}  # noqa: SIM118
    os.stat(weights.location)  # it is there still: no newer version was written over it meanwhile
    return _parts(joined, json.loads(metadata[_LAYOUT]))


def _layout(tensors: Mapping[str, Tensor]) -> list[tuple[str, str, list[int]]]:
    return [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()]


def _places(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make a file for such tensors. Returns theirs: what is copied there is in the file."""
    layout = _layout(tensors)
    joined = {
        str(dtype): torch.zeros(sum(t.numel() for t in tensors.values() if t.dtype == dtype), dtype=dtype)
        for dtype in {tensor.dtype for tensor in tensors.values()}
    }
    file.unlink(missing_ok=True)
    save_file(joined, file, {_LAYOUT: json.dumps(layout)})
    whole = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)
    body = _LENGTH.size + _LENGTH.unpack(whole[: _LENGTH.size].numpy().tobytes())[0]
    header = json.loads(whole[_LENGTH.size : body].numpy().tobytes())
    for name, zeros in joined.items():
        start, end = header[name]["data_offsets"]
        joined[name] = whole[body + start : body + end].view(zeros.dtype)
    return _parts(joined, layout)


def _parts(
    joined: Mapping[str, Tensor], layout: Sequence[tuple[str, str, Sequence[int]]]
) -> dict[str, Tensor]:
    """Each tensor of a layout, of those of its type that lie joined."""
    tensors: dict[str, Tensor] = {}
    for dtype, whole in joined.items():
        shapes = {name: shape for name, its_dtype, shape in layout if its_dtype == dtype}
        parts = whole.split_with_sizes([prod(shape) for shape in shapes.values()])
        for (name, shape), part in zip(shapes.items(), parts, strict=True):
            tensors[name] = part.view(*shape)
    return tensors
