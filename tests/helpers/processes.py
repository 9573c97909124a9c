"""The processes of a run."""

from contextlib import suppress
from pathlib import Path


def worker_of(controller: int, name: str) -> int:
    """The process id of a worker. They are the children of the fork server."""
    (found,) = (
        worker
        for child in children_of(controller)
        for worker in children_of(child)
        if Path(f"/proc/{worker}/comm").read_text().strip() == name
    )
    return found


def loader_of(controller: int) -> int:
    """The process id of what imports the reward function, a child of the reward worker."""
    (found,) = children_of(worker_of(controller, "scorer-0"))
    return found


def children_of(parent: int) -> list[int]:
    """The children of all threads of a process."""
    found: list[int] = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(FileNotFoundError):  # it has ended
            found += map(int, children.read_text().split())
    return found
