"""The [weights] section."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from tailrace.contracts.mark import claim
from tailrace.contracts.weights import KEPT_VERSIONS
from tailrace.kinds import OneOf
from tailrace.settings import RunPath, Settings

VERSION, PARTIAL, LOCK = "version-", "partial-", ".lock"
VERSIONS = (f"{VERSION}[0-9]*", f"{PARTIAL}[0-9]*", LOCK)
"""The names in the folder that versions are written to."""


def claim_versions(folder: Path, *, only_check: bool = False) -> None:
    """Own the versions in `weights.folder`. Arguments and errors as `contracts.mark.claim`."""
    are_ours = all(any(each.glob("*.safetensors")) for each in folder.glob(f"{VERSION}*"))
    earlier = VERSIONS if are_ours and (folder / LOCK).exists() else ()
    claim(folder, "train", VERSIONS, earlier, key="weights.folder", only_check=only_check)


class ProbeSettings(Settings):
    """How publications are proven."""

    probe_every: int = Field(default=1, ge=0)
    """Every so many publications each engine proves that it has the new weights, by checksums and log-probs
    of a fixed sequence. 0: never. The embedded engine can, and vLLM with `sampling.temperature = 1`."""
    transport: str
    """Selects a transport."""

    one_host: ClassVar[bool] = False
    """Whether trainer and engines must be on one host."""
    kept: ClassVar[int] = 0
    """Publications in the memory of the trainer's host."""
    in_folders: ClassVar[bool] = False
    """Whether a version is a folder that stays, with a whole model or an adapter."""
    is_streamed: ClassVar[bool] = False
    """Whether the trainer sends tensors, and writes no files."""

    @property
    def shares_transfers(self) -> bool:
        """Whether engines that load a version together get it in one transfer."""
        return True

    @property
    def on_devices(self) -> bool:
        """Whether weights go from device to device."""
        return False

    @property
    def needs_address(self) -> bool:
        """Whether engines reach the trainer at an address that the settings do not give."""
        return "host" in type(self).model_fields.keys() - self.model_fields_set

    def in_run_folder(self, run_folder: Path) -> Self:
        """Return the settings with a folder, where the transport needs one. Raises a ConfigError if it would
        replace there what is not its own."""
        return self


class SharedMemorySettings(ProbeSettings):
    """Trainer and engines on one host: files in shared memory."""

    transport: Literal["shared_memory"] = "shared_memory"
    """Selects this transport."""
    one_host: ClassVar[bool] = True
    kept: ClassVar[int] = KEPT_VERSIONS + 1


class FilesystemSettings(ProbeSettings):
    """A complete Hugging Face folder for each version, which any server can read. The last two are kept."""

    transport: Literal["filesystem"] = "filesystem"
    """Selects this transport."""
    in_folders: ClassVar[bool] = True
    folder: RunPath | None = None
    """The folder that the versions are written to. It has the same path on all hosts, for example on NFS.
    Without it: `weights` in the run's folder."""
    shard_bytes: int = Field(default=5_000_000_000, ge=1)
    """Size of a safetensors file, at most, unless one tensor is larger."""

    @override
    def in_run_folder(self, run_folder: Path) -> Self:
        folder = self.folder or (run_folder / "weights").absolute()
        claim_versions(folder, only_check=True)
        return self.model_copy(update={"folder": folder})


class ProcessGroupSettings(ProbeSettings):
    """Broadcasts over torch.distributed."""

    transport: Literal["process_group"] = "process_group"
    """Selects this transport."""
    is_streamed: ClassVar[bool] = True
    kept: ClassVar[int] = KEPT_VERSIONS
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: host memory and TCP. nccl: from CUDA device to CUDA device, not shared by trainer and engine."""
    groups: Literal["one", "each"] = "one"
    """one: engines that load a version together get it in one broadcast. each: each gets a transfer of its
    own, where engines do not reach one another."""
    host: str = "127.0.0.1"
    """The address of the trainer's host under which engines reach it. The trainer listens on it. There is no
    authentication: a network that others can reach is not safe."""
    bucket_bytes: int = Field(default=256 * 2**20, ge=1)
    """Size of one message, at most, unless one tensor is larger."""
    message_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """Seconds that connecting, or one message, may take. Less than `engine.health_timeout_s`: an engine that
    waits for the trainer does not answer."""

    @property
    @override
    def shares_transfers(self) -> bool:
        return self.groups == "one"

    @property
    @override
    def on_devices(self) -> bool:
        return self.backend == "nccl"


_TRANSPORTS = SharedMemorySettings, FilesystemSettings, ProcessGroupSettings
WeightsSettings = Annotated[
    ProbeSettings, OneOf("weights", *_TRANSPORTS, default="shared_memory", key="transport")
]
