"""How many tokens an engine has produced, where a kill cannot take it: a number in a mapped file.

The engine counts before it reports, so what reached the controller is never more than what is counted. The
difference after a kill is what was lost on the way.
"""

import mmap
import struct
from pathlib import Path

from tailrace.errors import LedgerError

COUNTS_FOLDER = "counts"
"""In a run's folder: a file an engine and life."""
_NUMBER = struct.Struct("Q")


class TokenCounter:
    """One engine's count in one life."""

    def __init__(self, path: Path) -> None:
        """Goes on from what the file says, if there is one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(bytes(_NUMBER.size))  # not a hole: a full disk would be a SIGBUS later
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), _NUMBER.size)
        # Stored as a whole. Struct would first write zeros there, which a kill might leave.
        self._number = memoryview(mapped).cast("Q")
        self._before = self._number[0]

    def set(self, num_generated: int) -> None:
        """Tokens since this counter was made."""
        self._number[0] = self._before + num_generated


def counted_tokens(folder: Path) -> int:
    """Of all engines and lives of a run.

    Raises:
        LedgerError: a file is not a count.
    """
    return sum(_count(path) for path in sorted(folder.glob("*.count")))


def _count(path: Path) -> int:
    try:
        (count,) = _NUMBER.unpack(path.read_bytes())
    except struct.error:
        raise LedgerError(
            f"{path} is damaged; put a copy back, or begin a new run in another --output-dir"
        ) from None
    return int(count)
