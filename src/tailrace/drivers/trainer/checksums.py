"""Checksums of the files of a checkpoint, in checksums.json beside them, without torch.

CRC-32, which the ledger's rows have, too: it finds all damage of up to 32 bits in sequence, other damage
but for one in 2^32, and is several times faster than the cryptographic hashes, which guard against intention.
"""

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from zlib import crc32

import msgspec

from tailrace.contracts.trainer import is_checkpoint
from tailrace.errors import CheckpointError, say

CHECKSUMS_FILE, PARTIAL = "checksums.json", ".partial"
STATE_FOLDER = "trainer"
"""Part of a checkpoint that does not belong to the model (checkpoint.py)."""
CHUNK_BYTES = 2**20
WEIGHTS = ".safetensors"


class Checksums(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    step: int
    """Optimizer steps before the checkpoint."""
    files: dict[str, str]
    """CRC-32 of each file, in hexadecimal."""
    retired: list[str] = []
    """Files of the optimizer's state that were removed, or that a kill left to be removed."""


def seal(folder: Path, step: int) -> None:
    """Write the checksums of all files of a folder, and everything to the disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {str(path.relative_to(folder)): _checksum(path) for path in paths}
    written = _encode(Checksums(step, sums))
    (folder / CHECKSUMS_FILE).write_bytes(written)
    for path in [*folder.rglob("*"), folder]:
        synchronize(path)


def seal_model(model: Path, checkpoint: Path, changed: Collection[str] = ()) -> None:
    """Give an exported model the checksums of its files in a checkpoint, but for those that were changed. One
    without checksums gives none."""
    with suppress(FileNotFoundError):
        known = read_checksums(checkpoint / CHECKSUMS_FILE)
        found = {name: each for name, each in known.files.items() if (model / name).exists()}
        found |= {name: _checksum(model / name) for name in changed}
        (model / CHECKSUMS_FILE).write_bytes(_encode(Checksums(known.step, found)))


def retire(older: Sequence[Path], newest: Path) -> None:
    """Remove the state of the optimizer, by their checksums, from checkpoints that keep the model. One
    without checksums, or with damaged ones, stays as it is. After a kill at any moment each is whole, with
    its state or without it. Raises a CheckpointError, with nothing removed, if the newest one is damaged."""
    verify(newest, remedy(newest))
    for folder in older:
        file, state = folder / CHECKSUMS_FILE, folder / STATE_FOLDER
        with suppress(FileNotFoundError, CheckpointError):
            known = read_checksums(file)
            goes = sorted(name for name in known.files if name.startswith(f"{STATE_FOLDER}/"))
            if goes:
                stays = {name: each for name, each in known.files.items() if name not in goes}
                known = Checksums(known.step, stays, goes)
                partial = file.with_name(file.name + PARTIAL)
                partial.write_bytes(_encode(known))
                synchronize(partial)
                partial.replace(file)
                synchronize(folder)
            if state.is_symlink():  # of a user: what it leads to is not the run's
                continue
            for name in known.retired:
                (folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # a file of a user is in it
                state.rmdir()


def is_retired(folder: Path) -> bool:
    """Whether the state of the optimizer was removed from a checkpoint. Raises as `read_checksums`."""
    return bool(read_checksums(folder / CHECKSUMS_FILE).retired)


def remedy(folder: Path) -> str:
    """Return the remedy for a damaged checkpoint."""
    found = filter(is_checkpoint, folder.parent.glob("round_*"))
    before = [path for path in found if path.name < folder.name]
    with suppress(FileNotFoundError, CheckpointError):
        if before and not is_retired(newest := max(before)):
            return f"remove {folder} and resume again: the run goes on from {newest.name}"
    weights = f" with --model.path {max(before)}" if before else ""
    return f"put a copy of it back, or begin a new run in another --output-dir{weights}"


def verify(folder: Path, advice: str, *, step: int | None = None, is_editable: bool = False) -> bool:
    """Compare the files of a checkpoint with its checksums. Returns whether it has any. Raises a
    CheckpointError if a file is missing or has other content, or the checkpoint is that of another step.

    Args:
        advice: what to do about a damaged checkpoint.
        step: the optimizer steps that it must have.
        is_editable: users may edit all but the weights: what has changed is named on the standard error.
    """
    try:
        known = read_checksums(folder / CHECKSUMS_FILE)
    except FileNotFoundError:
        return False
    except CheckpointError as why:
        raise CheckpointError(f"{why}; {advice}") from None
    for name, checksum in known.files.items():
        try:
            problem = "" if _checksum(folder / name) == checksum else "is damaged: its checksum differs"
        except OSError as why:
            problem = f"cannot be read ({why.strerror})"
        if problem and is_editable and not name.endswith(WEIGHTS):
            say(f"warning: {folder / name} was changed after a run wrote it")
        elif problem:
            raise CheckpointError(f"{folder / name} {problem}; {advice}")
    if step is not None and known.step != step:
        raise CheckpointError(
            f"{folder} has {known.step} optimizer steps, and the ledger says {step}: "
            f"it is another one; {advice}"
        )
    return True


def read_checksums(file: Path) -> Checksums:
    """Raises a FileNotFoundError, or a CheckpointError if the file is damaged."""
    content = file.read_bytes()
    try:
        known = msgspec.json.decode(content.partition(b"\n")[0], type=Checksums)
    except (msgspec.DecodeError, UnicodeDecodeError):
        known = None
    if known is None or _encode(known) != content:
        raise CheckpointError(f"{file} is damaged")
    return known


def begin(folder: Path) -> Path:
    """Make an empty folder that `replacing` puts in the place of another one."""
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


@contextmanager
def replacing(folder: Path, partial: Path | None = None) -> Iterator[Path]:
    """Put what the block writes in the place of a folder, which stays until then. If the block raises, what
    it has written is removed. `partial`: from `begin`; None: an empty one."""
    partial, old = partial or begin(folder), folder.with_name(f"{folder.name}.old{PARTIAL}")
    try:
        yield partial
        shutil.rmtree(old, ignore_errors=True)
        if folder.is_dir():
            folder.rename(old)
        partial.rename(folder)
        synchronize(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def synchronize(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(sums: Checksums) -> bytes:
    """One line of JSON, and its own checksum on the next."""
    line = msgspec.json.encode(sums)
    return line + f"\n{crc32(line):08x}\n".encode()


def _checksum(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = crc32(chunk, checksum)
    return f"{checksum:08x}"
