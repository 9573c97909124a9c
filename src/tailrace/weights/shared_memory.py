"""Weight transport on one host: one safetensors file per version, in shared memory.

A version is written under a temporary name and renamed, so a reader sees a complete file or none.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tailrace.errors import TransferFailed
from tailrace.weights.base import KEPT_VERSIONS, Link, Weights
from tailrace.weights.tensors import manifest

_PREFIX, _LOCK = "tailrace-", "lock"


def shared_memory() -> Path:
    """Return the folder for files in memory: /dev/shm where it is writable, else the temporary folder."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


class SharedMemorySender:
    """Writes published versions into a folder of its own and keeps the last KEPT_VERSIONS.

    A process that was killed leaves its folder behind. The next sender removes it: the lock file of a folder
    is held for as long as its process lives.
    """

    def __init__(self) -> None:
        memory = shared_memory()
        for lock in memory.glob(f"{_PREFIX}*/{_LOCK}"):
            with suppress(Timeout), FileLock(lock).acquire(timeout=0):  # Timeout: the owner is alive
                shutil.rmtree(lock.parent, ignore_errors=True)
        # A folder gets its final name only once it is locked: until then another process would remove it.
        unlocked = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}", dir=memory))
        self._lock = FileLock(unlocked / _LOCK, thread_local=False)
        self._lock.acquire()
        self.folder = unlocked.rename(memory / unlocked.name.removeprefix("new-"))
        self._kept: list[Path] = []
        """Files of the kept versions, the oldest first."""

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> Weights:
        """As WeightSender.publish."""
        file = self.folder / f"{version}.safetensors"
        partial = file.with_suffix(".partial")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        except SafetensorError as why:
            partial.unlink(missing_ok=True)
            remedy = f"the {KEPT_VERSIONS} last versions of the weights and one more must fit there"
            raise TransferFailed(
                f"{file}: {why}; {remedy} (in a container: --shm-size); make room, then --resume"
            ) from why
        partial.rename(file)
        self._kept = [*(kept for kept in self._kept if kept != file), file]
        while len(self._kept) > KEPT_VERSIONS:
            self._kept.pop(0).unlink(missing_ok=True)
        return Weights(version, str(file), manifest(tensors))

    def send(self, version: int, link: Link) -> None:
        """Nothing: engines read the file."""

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()
