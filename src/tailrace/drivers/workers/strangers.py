"""Connections to a port of this process that have not said yet who they are or what they want: few are kept,
and none for long, as they share its file descriptors with its work."""

import asyncio
import resource
from contextlib import suppress

MAX_STRANGERS, ACCEPTED_AT_ONCE, BACKLOG = 48, 4, 128
"""Strangers of a port, connections that a turn of the event loop accepts, and those that wait in the kernel.
Those of four turns have descriptors before the first ones are closed: 64 in all."""


class Strangers:
    """The strangers of a port. Of one too many the oldest is closed, and each after `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._limits: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._limits)

    def add(self, transport: asyncio.Transport) -> None:
        """Count a connection as a stranger, from the first call on."""
        if transport not in self._limits:
            self._limits[transport] = asyncio.get_running_loop().call_later(self._limit_s, transport.abort)
            if len(self) > MAX_STRANGERS:
                self.drop_oldest()

    def remove(self, transport: asyncio.Transport) -> None:
        """Count a connection as known, or as closed."""
        if limit := self._limits.pop(transport, None):
            limit.cancel()

    def drop_oldest(self) -> None:
        """Close the connection that has been a stranger for the longest time."""
        oldest = next(iter(self._limits))
        self.remove(oldest)
        oldest.abort()


def raise_file_limit() -> int:
    """Raise the limit of descriptors of this process and of those that it starts, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has "unlimited" and refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
