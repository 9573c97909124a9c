"""The processes of a run."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

DEADLINE_S = 90.0
"""A test that waits longer hangs, and fails instead of stopping the suite."""


def worker_of(controller: int, name: str) -> int:
    """The process id of the one worker of this name."""
    (found,) = workers_of(controller, name)
    return found


def workers_of(controller: int, name: str) -> set[int]:
    """The process ids of the workers of this name. They are the children of the fork server."""
    return {
        worker
        for child in children_of(controller)
        for worker in children_of(child)
        if name_of(worker) == name
    }


def name_of(process: int) -> str:
    """The name that the kernel has for a process; "" where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""


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


async def start_controller(script: str, *arguments: object) -> tuple[asyncio.subprocess.Process, list[str]]:
    """Start a script beside the tests of workers. Returns it and the words of its first line."""
    tests = Path(__file__).parents[1]
    controller = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        cwd=tests / "drivers" / "workers",
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
    )
    assert controller.stdout is not None
    return controller, (await controller.stdout.readline()).decode().split()
