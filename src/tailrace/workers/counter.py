"""The number of tokens that an engine has generated, in a memory-mapped file that survives a kill.

The engine counts tokens before it reports them, so the controller never knows more tokens than are counted.
After a kill the difference is the number of tokens that were lost on the way.
"""

import mmap
import struct
from pathlib import Path

from tailrace.errors import LedgerError

COUNTS_FOLDER = "counts"
"""Folder inside a run's folder; one file per engine and life of the run."""
_NUMBER = struct.Struct("Q")


class TokenCounter:
    """The token count of one engine in one life of a run."""

    def __init__(self, path: Path) -> None:
        """Open the file and continue its count, or create it with a count of 0."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(bytes(_NUMBER.size))  # no sparse file: a full disk would cause a SIGBUS
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), _NUMBER.size)
        # One 8-byte store. struct.pack_into would write zeros first, which a kill might leave.
        self._number = memoryview(mapped).cast("Q")
        self._before = self._number[0]

    def set(self, num_generated: int) -> None:
        """Set the count to the tokens generated since this object was created, added to the initial count."""
        self._number[0] = self._before + num_generated


def counted_tokens(folder: Path) -> int:
    """Return the number of tokens that all engines generated in all lives of a run.

    Args:
        folder: the folder of the count files.

    Raises:
        LedgerError: a file is damaged.
    """
    num_tokens = 0
    for path in sorted(folder.glob("*.count")):
        try:
            num_tokens += _NUMBER.unpack(path.read_bytes())[0]
        except struct.error:
            remedy = "put a copy back, or begin a new run in another --output-dir"
            raise LedgerError(f"{path} is damaged; {remedy}") from None
    return num_tokens
