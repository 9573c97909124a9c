"""Weight transport by files: a folder for each version, on a file system or in shared memory.

On a file system a version is a complete Hugging Face folder with config.json, the tokenizer and safetensors
files, so any server can load it; or it is an adapter in peft's files. In shared memory it has the weights
only. A version is written under a temporary name, synchronised to the disk and renamed: a reader sees a
complete folder or none.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from tailrace.contracts.mark import Mark, remove
from tailrace.contracts.weights import KEPT_VERSIONS, Link, TensorInfo, Weights, WeightSender
from tailrace.drivers.weights.settings import LOCK, PARTIAL, VERSION, VERSIONS, claim_versions
from tailrace.drivers.weights.tensors import manifest
from tailrace.errors import ConfigError, TransferFailed, disk_remedy
from tailrace.model_folder import read_config

_PREFIX = "tailrace-"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."
"""Prefix of the names in peft's files."""
_COPIED = ("*.json", "*.txt", "*.jinja", "*.model")
"""Files of the model folder that are in each version: config, generation config and tokenizer."""


class FilesystemSender(WeightSender):
    """Stores versions as folders, and keeps the last KEPT_VERSIONS. Raises a ConfigError if the folder cannot
    be written to, or another trainer uses it.

    Args:
        folder: where the versions are written. What an earlier process left there is removed.
        model: the Hugging Face folder that is trained. None: versions have the weights only.
        shard_bytes: size of a safetensors file, at most.
        adapter: the peft config of the adapters that are published in place of whole weights.
    """

    def __init__(
        self,
        folder: Path,
        model: Path | None,
        shard_bytes: int = 0,
        adapter: Mapping[str, object] | None = None,
    ) -> None:
        self.folder, self._model, self._shard_bytes, self._adapter = folder, model, shard_bytes, adapter
        self._is_temporary = False
        self._kept: list[Path] = []
        """The kept versions, the oldest first."""
        try:
            claim_versions(folder)
            self._lock = FileLock(folder / LOCK, thread_local=False)
            self._lock.acquire(timeout=0)
        except Timeout:
            problem = "another trainer publishes its weights there"
            raise ConfigError("weights.folder", str(folder), problem, "choose another folder") from None
        except OSError as why:
            problem = f"it cannot be written to ({why})"
            raise ConfigError("weights.folder", str(folder), problem, "choose another folder") from None
        for left in Mark("", [*VERSIONS]).owned_in(folder):
            if left.name != LOCK:
                remove(left)

    @classmethod
    def in_shared_memory(cls) -> "FilesystemSender":
        """Store versions in a folder of its own in shared memory, which `close` removes.

        A process that was killed leaves its folder behind. The next sender removes it: the lock file of a
        folder is held for as long as its process lives.
        """
        memory = shared_memory()
        for lock in memory.glob(f"{_PREFIX}{'?' * 8}/{LOCK}"):
            with suppress(Timeout), FileLock(lock).acquire(timeout=0):  # Timeout: the owner is alive
                shutil.rmtree(lock.parent, ignore_errors=True)
        # A folder gets its final name only once it is locked: until then another process would remove it.
        unlocked = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}", dir=memory))
        sender = cls(unlocked, None)
        sender.folder = unlocked.rename(memory / unlocked.name.removeprefix("new-"))
        sender._is_temporary = True
        return sender

    @override
    def store(self, tensors: Mapping[str, Tensor], version: int) -> Weights:
        final, partial = (self.folder / f"{prefix}{version}" for prefix in (VERSION, PARTIAL))
        infos = manifest(tensors)
        try:
            partial.mkdir()
            self._write(partial, {name: tensor.contiguous() for name, tensor in tensors.items()}, infos)
            _synchronize(partial)
            shutil.rmtree(final, ignore_errors=True)  # a version that was undone
            partial.rename(final)
            _synchronize(self.folder)
        except (OSError, SafetensorError) as why:
            shutil.rmtree(partial, ignore_errors=True)
            raise TransferFailed(
                f"{final} cannot be written ({why}); the {KEPT_VERSIONS} last versions of the weights and "
                f"one more must fit there (/dev/shm of a container: --shm-size); {disk_remedy(why)}, "
                "then --resume"
            ) from why
        self._kept = [*(kept for kept in self._kept if kept != final), final]
        while len(self._kept) > KEPT_VERSIONS:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)
        return Weights(version, str(final), infos)

    @override
    def send(self, version: int, link: Link) -> None:
        """Do nothing: engines read the folder."""

    @override
    def close(self) -> None:
        """Let another trainer use the folder. The versions stay, but not in shared memory."""
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def _write(self, folder: Path, tensors: dict[str, Tensor], infos: Sequence[TensorInfo]) -> None:
        if self._model is None:
            save_file(tensors, folder / "model.safetensors")
        elif self._adapter is None:
            _write_config(folder, self._model, infos[0].dtype)
            save_torch_state_dict(tensors, folder, max_shard_size=self._shard_bytes)
        else:
            named = {ADAPTER_PREFIX + name: tensor for name, tensor in tensors.items()}
            save_file(named, folder / ADAPTER_FILE, metadata={"format": "pt"})
            (folder / ADAPTER_CONFIG).write_text(json.dumps(self._adapter, indent=2), encoding="utf-8")


def shared_memory() -> Path:
    """Return the folder for files in memory: /dev/shm where it is writable, else the temporary folder."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def _write_config(folder: Path, model: Path, dtype: str) -> None:
    for pattern in _COPIED:
        for file in filter(Path.is_file, model.glob(pattern)):
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copy(file, folder)
    # Older servers read the second key.
    config = read_config(model) | {"dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _synchronize(folder: Path) -> None:
    """Write a folder and its files to the disk."""
    for path in [*filter(Path.is_file, folder.iterdir()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
