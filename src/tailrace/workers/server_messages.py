"""The job of an inference server that a run starts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tailrace.workers.messages import Job, Ready

LOOPBACK = "127.0.0.1"


class ServerJob(Job):
    """Run an inference server."""

    command: tuple[str, ...]
    """On another host the loopback address in it is that host's own."""
    env: dict[str, str] = {}
    """Environment variables beside those of the controller."""
    plugins: Path | None = None
    """A folder that is written before the server starts, and removed with it: there this package is a plug-in
    of vLLM."""
    needs: dict[str, Path] = {}
    """As `folders`."""

    def folders(self) -> Mapping[str, Path]:
        """As Job.folders."""
        return self.needs

    def at(self, address: str) -> Self:
        """As Job.at. The server listens on that address."""
        command = tuple(address if word == LOOPBACK else word for word in self.command)
        return self.model_copy(update={"command": command})


FromServer = Ready
"""The parent of a server sends nothing. The server answers over HTTP."""
