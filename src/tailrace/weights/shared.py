"""Weights from the trainer to the engines of one host: safetensors files in shared memory.

A version is one file, written under another name and renamed, so a reader sees all of it or nothing.
The last two versions are kept: an engine may still be reading the one before the newest. Tensors that were
read stay valid when their file is removed.

All tensors of a type lie in the file as one, because each tensor of a file costs more than its bytes: the
trainer waits while a small model is written, and the engine while it is read.
"""

import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
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
        self._files: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, tensors: Mapping[str, Tensor], version: int) -> Weights:
        """Put a version where `read` finds it, and forget the oldest one kept.

        Args:
            tensors: by name, no two sharing memory.
        """
        file = self._folder / f"{version}.safetensors"
        partial = file.with_suffix(".partial")
        flat: defaultdict[str, list[Tensor]] = defaultdict(list)
        for tensor in tensors.values():
            flat[str(tensor.dtype)].append(tensor.reshape(-1))
        layout = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
        joined = {dtype: torch.cat(parts) for dtype, parts in flat.items()}
        save_file(joined, partial, {_LAYOUT: json.dumps(layout)})
        partial.replace(file)
        if file not in self._files:
            self._files.append(file)
        while len(self._files) > KEPT_VERSIONS:
            self._files.pop(0).unlink()
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
        layout = json.loads(metadata[_LAYOUT])
        joined = {dtype: file.get_tensor(dtype) for dtype in {dtype for _, dtype, _ in layout}}
    places = dict.fromkeys(joined, 0)
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in layout:
        start, places[dtype] = places[dtype], places[dtype] + prod(shape)
        tensors[name] = joined[dtype][start : places[dtype]].view(shape)
    return tensors
