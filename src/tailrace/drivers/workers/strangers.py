"""Connections to a port of this process that have not said yet who they are or what they want: few are kept,
and none for long, as they share its file descriptors with its work."""

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress

MAX_STRANGERS, BACKLOG = 48, 128
"""Strangers of a port, and connections that wait in the kernel."""
ACCEPT_AGAIN_S = 0.1
"""Seconds after which a port that could accept no connection tries again."""


class Strangers:
    """The strangers of a port. Each is closed after `limit_s` seconds, and after `grace_s` if others wait."""

    def __init__(self, limit_s: float, grace_s: float) -> None:
        self._limit_s, self._grace_s = limit_s, grace_s
        self._limits: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        self._fewer = asyncio.Event()

    def __len__(self) -> int:
        return len(self._limits)

    def add(self, transport: asyncio.Transport) -> None:
        """Count a connection as a stranger, from the first call on."""
        if transport not in self._limits:
            self._limits[transport] = asyncio.get_running_loop().call_later(self._limit_s, transport.abort)

    def remove(self, transport: asyncio.Transport) -> None:
        """Count a connection as known, or as closed."""
        if limit := self._limits.pop(transport, None):
            limit.cancel()
            self._fewer.set()

    def drop_oldest(self) -> None:
        """Close the connection that has been a stranger for the longest time."""
        oldest = next(iter(self._limits))
        self.remove(oldest)
        oldest.abort()

    async def room(self) -> None:
        """Wait until there is room for one more: the oldest is closed once it has had its grace."""
        while len(self) >= MAX_STRANGERS:
            self._fewer.clear()
            oldest = next(iter(self._limits.values()))
            try:
                async with asyncio.timeout_at(oldest.when() - self._limit_s + self._grace_s):
                    await self._fewer.wait()
            except TimeoutError:
                self.drop_oldest()
                await asyncio.sleep(0)  # its descriptor is closed before another one is taken


class Door:
    """Accepts the connections to listening sockets, as an `asyncio.Server` does, but while there is no room
    among the strangers leaves them in the kernel, where they have no descriptor."""

    def __init__(
        self, make: Callable[[], asyncio.Protocol], sockets: Iterable[socket.socket], strangers: Strangers
    ) -> None:
        self._make, self._strangers, self.sockets = make, strangers, tuple(sockets)
        for each in self.sockets:
            each.setblocking(False)
            each.listen(BACKLOG)
        self._accepting = [asyncio.create_task(self._accept(each)) for each in self.sockets]

    def close(self) -> None:
        """Stop, and close the sockets."""
        for task, listening in zip(self._accepting, self.sockets, strict=True):
            task.cancel()
            if listening.fileno() >= 0:  # the reader goes before its number is that of another file
                asyncio.get_running_loop().remove_reader(listening)
                listening.close()

    async def wait_closed(self) -> None:
        """Wait for the end of what `close` stops."""
        await asyncio.wait(self._accepting)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._strangers.room()
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError:  # the peer has gone, or no descriptor is left
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            with suppress(OSError):
                await loop.connect_accepted_socket(self._make, accepted)


def raise_file_limit() -> int:
    """Raise the limit of descriptors of this process and of those that it starts, and return it."""
    import resource  # a browser, which only simulates, has none

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has "unlimited" and refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
