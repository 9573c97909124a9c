"""Weights from the trainer to the engines of one host: safetensors files in shared memory.

A version is one file, written under another name and renamed, so a reader sees all of it or nothing.
The last three versions are kept: an engine may still be reading the one before the newest, and the trainer
may be a version ahead of what engines were told of. Tensors that were read are the reader's own.

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
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailrace.weights.base import Weights

KEPT_VERSIONS = 3
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
        """Put a version where a reader finds it, over the oldest one kept.

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
        if not _alike(places, tensors):
            places = _places(partial, tensors)
        for name, tensor in tensors.items():
            places[name].copy_(tensor)
        partial.rename(file)
        self._kept.pop(file, None)  # the same version, written again
        self._kept[file] = places
        return Weights(version, str(file))


class WeightsReader:
    """Reads published versions. It keeps the memory of the last files: they are written over and come again,
    and to open one takes longer than to copy what is in it."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], _Joined] = {}
        """By device and inode."""

    def read(self, weights: Weights) -> dict[str, Tensor]:
        """The tensors of a published version, or of a checkpoint's file, on the CPU, by name.

        Raises:
            FileNotFoundError: three newer versions were published since.
        """
        with open(weights.location, "rb") as file:
            status = os.fstat(file.fileno())
            inode = status.st_dev, status.st_ino
            if inode not in self._files:
                joined = _Joined.of(np.frombuffer(mmap(file.fileno(), 0, access=ACCESS_READ), np.uint8))
                if joined is None:
                    plain: dict[str, Tensor] = load_file(weights.location)
                    return plain
                while len(self._files) >= KEPT_VERSIONS:
                    del self._files[next(iter(self._files))]
                self._files[inode] = joined
        tensors = self._files[inode].copy().tensors()
        os.stat(weights.location)  # it is there still: no newer version was written over it meanwhile
        return tensors


@dataclass(frozen=True, slots=True)
class _Joined:
    """Tensors as they lie in a file of ours."""

    parts: Mapping[str, NDArray[np.uint8]]
    """Of each type, all tensors one after another."""
    layout: Sequence[tuple[str, str, Sequence[int]]]
    """Name, type and shape of each."""

    @classmethod
    def of(cls, file: NDArray[np.uint8]) -> "_Joined | None":
        """None: it is not one of ours."""
        body = _LENGTH.size + _LENGTH.unpack(file[: _LENGTH.size].tobytes())[0]
        header = json.loads(file[_LENGTH.size : body].tobytes())
        metadata = header.pop("__metadata__", {})
        if _LAYOUT not in metadata:
            return None
        places = {name: entry["data_offsets"] for name, entry in header.items()}
        parts = {name: file[body + start : body + end] for name, (start, end) in places.items()}
        return cls(parts, json.loads(metadata[_LAYOUT]))

    def copy(self) -> "_Joined":
        return _Joined({dtype: part.copy() for dtype, part in self.parts.items()}, self.layout)

    def tensors(self) -> dict[str, Tensor]:
        """By name, in this memory."""
        tensors: dict[str, Tensor] = {}
        for dtype, part in self.parts.items():
            shapes = {name: shape for name, its_dtype, shape in self.layout if its_dtype == dtype}
            whole = torch.from_numpy(part).view(getattr(torch, dtype.removeprefix("torch.")))
            pieces = whole.split_with_sizes([prod(shape) for shape in shapes.values()])
            for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
                tensors[name] = piece.view(*shape)
        return tensors


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Tensors of the same names, types and shapes."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and tensor.shape == other[name].shape
        for name, tensor in one.items()
    )


def _places(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make a file for such tensors. Returns theirs: what is copied there is in the file."""
    layout = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()]
    zeros = {
        str(dtype): torch.zeros(sum(t.numel() for t in tensors.values() if t.dtype == dtype), dtype=dtype)
        for dtype in {tensor.dtype for tensor in tensors.values()}
    }
    file.unlink(missing_ok=True)
    save_file(zeros, file, {_LAYOUT: json.dumps(layout)})
    joined = _Joined.of(np.memmap(file, np.uint8, "r+"))
    assert joined is not None
    return joined.tensors()
