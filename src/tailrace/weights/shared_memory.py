"""Weight transport on one host: one safetensors file per version, in shared memory.

A version is written under a temporary name and renamed, so a reader sees a complete file or none.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailrace.weights.base import Weights

KEPT_VERSIONS = 2
"""Version n + 1 is written while engines may still read version n. Version n + 2 is written only after every
engine has loaded version n + 1, so no engine needs an older file."""
_PREFIX, _LOCK = "tailrace-", "lock"


def shared_memory() -> Path:
    """Return the folder for files in memory: /dev/shm where it is writable, else the temporary folder."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def own_folder() -> Iterator[Path]:
    """Create a folder in shared memory and remove it at the end of the block.

    A process that was killed leaves its folder behind. Such folders are removed first: the lock file of a
    folder is held for as long as its process lives.
    """
    memory = shared_memory()
    for lock in memory.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(Timeout), FileLock(lock).acquire(timeout=0):  # Timeout: the owner is alive
            shutil.rmtree(lock.parent, ignore_errors=True)
    # A folder gets its final name only once it is locked: until then another process would remove it.
    unlocked = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}", dir=memory))
    with FileLock(unlocked / _LOCK):
        folder = unlocked.rename(memory / unlocked.name.removeprefix("new-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class SharedWeights:
    """Writes published versions into a folder and keeps the last KEPT_VERSIONS."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: list[Path] = []
        """Files of the kept versions, the oldest first."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, tensors: Mapping[str, Tensor], version: int) -> Weights:
        """Write one version and remove the versions that are no longer kept.

        Args:
            tensors: by name; no two may share memory.

        Raises:
            OSError: the file cannot be written, for instance because shared memory is full.
        """
        file = self._folder / f"{version}.safetensors"
        partial = file.with_suffix(".partial")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        except SafetensorError as why:
            partial.unlink(missing_ok=True)
            remedy = f"the {KEPT_VERSIONS} last versions of the weights and one more must fit there"
            raise OSError(f"{file}: {why}; {remedy} (in a container: --shm-size)") from why
        partial.rename(file)
        self._kept = [*(kept for kept in self._kept if kept != file), file]
        while len(self._kept) > KEPT_VERSIONS:
            self._kept.pop(0).unlink(missing_ok=True)
        return Weights(version, str(file))


def read_weights(weights: Weights) -> dict[str, Tensor]:
    """Read the tensors of a published version, or of a checkpoint's safetensors file, on the CPU by name.

    The tensors stay valid after the file is removed.

    Raises:
        FileNotFoundError: the version is no longer kept.
    """
    tensors: dict[str, Tensor] = load_file(weights.location)
    return tensors
