"""Tokens that samples gained from one engine, counted by the controller in a file that survives a kill.

A token is counted when it arrives, before it is in its sample. So the ledger never knows more tokens than are
counted. After a kill the difference is the number of tokens that were not yet in the ledger's store.
"""

import mmap
import struct
from pathlib import Path
from zlib import crc32

from tailrace.errors import LedgerError

COUNTS_FOLDER = "counts"
"""Folder inside a run's folder; one file per engine and life of the run."""
_NUMBER = struct.Struct("Q")
_BITS = 40
"""Of the number; the 24 bits above are its checksum. In a file of an older version they are zero."""


class TokenCounter:
    """The token count of one engine in one life of a run.

    Args:
        path: the file; an existing count goes on. None: the count is in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.num = 0
        """Tokens counted since this object was created."""
        if path is None:
            self._number = memoryview(bytearray(_NUMBER.size)).cast("Q")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_bytes(bytes(_NUMBER.size))  # no sparse file: a full disk would cause a SIGBUS
            with path.open("r+b") as file:
                # One 8-byte store. struct.pack_into would write zeros first, which a kill might leave.
                self._number = memoryview(mmap.mmap(file.fileno(), _NUMBER.size)).cast("Q")
        self._before = self._number[0] % 2**_BITS

    def add(self, num_tokens: int) -> None:
        """Count tokens that have arrived."""
        self.num += num_tokens
        self._number[0] = _with_checksum(self._before + self.num)


def count_in(content: bytes) -> int:
    """Return the count in the content of a file.

    Raises:
        ValueError: it is damaged.
    """
    if len(content) != _NUMBER.size:
        raise ValueError(f"it has {len(content)} bytes")
    (word,) = _NUMBER.unpack(content)
    number: int = word % 2**_BITS
    if word not in (number, _with_checksum(number)):
        raise ValueError("its checksum differs")
    return number


def _with_checksum(number: int) -> int:
    return number | crc32(_NUMBER.pack(number)) >> 8 << _BITS


def counted_tokens(folder: Path) -> int:
    """Return the number of tokens that samples gained in all lives of a run.

    Args:
        folder: the folder of the count files.

    Raises:
        LedgerError: a file is damaged.
    """
    num_tokens = 0
    for path in sorted(folder.glob("*.count")):
        try:
            num_tokens += count_in(path.read_bytes())
        except ValueError as why:
            remedy = "put a copy back, or begin a new run in another --output-dir"
            raise LedgerError(f"{path} is damaged ({why}); {remedy}") from None
    return num_tokens
