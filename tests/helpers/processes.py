"""The processes of a run."""

from contextlib import suppress
from pathlib import Path


def worker_of(controller: int, name: str) -> int:
    """The process id of a worker that torch computes in. They are the children of the fork server."""
    (found,) = (
        worker
        for child in _children(controller)
        for worker in _children(child)
        if Path(f"/proc/{worker}/comm").read_text().strip() == name
    )
    return found


def loader_of(controller: int) -> int:
    """The process id of what imports the reward function, a child of the reward worker."""
    (found,) = (
        loader
        for child in _children(controller)
        if b"reward_child" in Path(f"/proc/{child}/cmdline").read_bytes()
        for loader in _children(child)
    )
    return found


def _children(parent: int) -> list[int]:
    with suppress(FileNotFoundError):  # it has ended
        return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []
