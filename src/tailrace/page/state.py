"""Whether a run goes on, by its files and by the lock that its process holds. It takes no lock itself."""

from pathlib import Path
from typing import NamedTuple

SILENT_S = 15.0
"""A live run writes its trace every 2 s. Longer silence has a reason."""


class State(NamedTuple):
    kind: str
    """'finished', 'starting', 'written', 'blocked': its process lives and writes nothing, 'ended': without
    closing, or 'silent': a simulation, or a run of another machine."""
    text: str


def state_of(folder: Path, now_s: float, *, is_closed: bool = False) -> State:
    """The state of a run.

    Args:
        folder: its output directory.
        now_s: the time, in Unix seconds.
        is_closed: nothing is open in its trace.
    """
    records = [folder / "metrics.jsonl", *folder.glob("trace*.json")]
    written_s = max((path.stat().st_mtime for path in records if path.exists()), default=0.0)
    lock, silent_s = folder / "lock", now_s - written_s
    process, summarized_s = _holder(lock), _modified(folder / "summary.json")
    # summary.json is the last file that a run writes. A copy of the folder may have other times.
    is_copy = is_closed and not process and silent_s >= SILENT_S
    if summarized_s and (summarized_s >= written_s or is_copy):
        return State("finished", "finished")
    if process and (begun_s := _modified(lock)) > written_s:
        said = f"process {process} has been starting its workers for {now_s - begun_s:,.0f} s; see logs/"
        return State("starting", said)
    if silent_s < SILENT_S:
        return State("written", "is being written")
    said = f"nothing was written for {silent_s:,.0f} s" if written_s else "nothing was written"
    if process:
        return State("blocked", f"process {process} lives, but {said}")
    if lock.exists():
        return State("ended", "ended without closing")
    return State("silent", f"not finished, and {said}")


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _holder(lock: Path) -> int | None:
    """The process of this machine that holds a lock file; None: none that is known."""
    try:
        inode = str(lock.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK  ADVISORY  WRITE 708 fe:00:5505 0 EOF
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode:
                return int(words[4])
    except (OSError, IndexError, ValueError):
        pass
    return None
