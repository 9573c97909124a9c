"""The part of a Ray actor that runs one worker process on its node, and relays its frames.

The worker is the process that it would be on the controller's host, with its socket and its log. It ends with
the actor, and the actor with the node or the run.
"""

import asyncio
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from tailrace.workers.messages import Job
from tailrace.workers.orphans import kill_group
from tailrace.workers.process import WorkerProcess


class Heard(NamedTuple):
    """What a worker has said.

    Args:
        frames: encoded messages, in order.
        last_words: how it ended; None: it has not.
    """

    frames: list[bytes]
    last_words: str | None


class NodeActor:
    """Starts one worker process and carries the messages of its conversation."""

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._frames: list[bytes] = []
        self._last_words: str | None = None
        self._something = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def node(self) -> tuple[str, str]:
        """Return the name of this node, and the address under which the other nodes reach it."""
        import ray.util

        return socket.gethostname(), ray.util.get_node_ip_address()

    async def missing(self, folders: Sequence[Path]) -> list[Path]:
        """Return those of the folders that this node does not have."""
        return [folder for folder in folders if not folder.is_dir()]

    async def start(self, name: str, module: str, job: Job, run: Path) -> None:
        """Start the worker.

        Args:
            run: folder of the run. The log goes to its `logs/` where the node has the folder, else to
                `tailrace/<name of the run>/logs/` of the folder for temporary files.
        """
        folder = run if run.is_dir() else Path(tempfile.gettempdir()) / "tailrace" / run.name
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(msgspec.Raw)
        self._process = await WorkerProcess.spawn(name, module, job, decoder, logs=folder / "logs")
        self._process.on_message = self._hear
        self._watch = asyncio.create_task(self._wait_for_end(self._process))

    async def tell(self, frames: Sequence[bytes]) -> None:
        """Send messages to the worker. A worker that has ended gets none."""
        assert self._process
        for frame in frames:
            if not self._process.has_ended:
                self._process.send(cast(msgspec.Struct, msgspec.Raw(frame)))  # encoded already

    async def hear(self) -> Heard:
        """Wait until the worker has said something or has ended."""
        await self._something.wait()
        self._something.clear()
        frames, self._frames = self._frames, []
        return Heard(frames, self._last_words)

    async def kill_group(self, leader: int) -> None:
        """Kill a process group that the worker has started."""
        kill_group(leader)

    async def abort(self, fault: str) -> None:
        """As Conversation.abort."""
        if self._process is not None:
            self._process.abort(fault)

    async def close(self) -> None:
        """Let the worker end."""
        if self._process is not None:
            await self._process.close()

    def _hear(self, message: msgspec.Struct) -> None:
        self._frames.append(bytes(cast(msgspec.Raw, message)))
        self._something.set()

    async def _wait_for_end(self, process: WorkerProcess) -> None:
        words = await process.last_words()
        self._last_words = f"{words}\n(on {socket.gethostname()})"
        self._something.set()
