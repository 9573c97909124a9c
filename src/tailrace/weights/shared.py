"""Weights from the trainer to the engines of one host: safetensors files in shared memory.

A version is one file, written under another name and renamed, so a reader sees all of it or nothing.
The last two versions are kept: an engine may still be reading the one before the newest.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tailrace.weights.base import Weights

KEPT_VERSIONS = 2


def shared_memory() -> Path:
    """Where files live in memory: /dev/shm if the host has it, else the folder for temporary files."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


class SharedWeights:
    """The published versions of one run, in a folder that it makes and removes."""

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
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        partial.replace(file)
        if file not in self._files:
            self._files.append(file)
        while len(self._files) > KEPT_VERSIONS:
            self._files.pop(0).unlink()
        return Weights(version, str(file))

    def close(self) -> None:
        """Remove the folder. Tensors already read stay valid."""
        shutil.rmtree(self._folder, ignore_errors=True)


def read(weights: Weights) -> dict[str, Tensor]:
    """The tensors of a published version, on the CPU, by name.

    Raises:
        FileNotFoundError: two newer versions were published since.
    """
    tensors: dict[str, Tensor] = load_file(weights.location)
    return tensors
