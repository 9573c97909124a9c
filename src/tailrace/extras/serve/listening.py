"""The one set-up of HTTP servers: `tailrace serve`, the sessions of agents, and `tailrace view`."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.clock import now
from tailrace.errors import ConfigError

BODY_TIMEOUT_S, BODY_BYTES_PER_S = 30.0, 2**16
"""A body must come within this time, and a second more for each so many bytes that have come."""
MAX_HELD_BYTES = 2**27
"""Bodies of all requests that have no reply yet, together."""


def bind(host: str, port: int, option: str) -> socket.socket:
    """Return a socket with the address, so that one in use is known before anything is loaded; port 0: a free
    one. Raises a ConfigError about the option if the address is in use or not of this machine."""
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
        return bound
    except OSError as why:
        problem = f"the server cannot listen there: {why}"
        raise ConfigError(option, f"{host}:{port}", problem, "choose another") from why


class BoundedBodies:
    """An application whose bodies come in time and do not fill the memory: its route gets HTTPException."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._num_held = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        began_s, num_bytes, is_whole = now(), 0, False

        async def bounded() -> Message:
            nonlocal num_bytes, is_whole
            limit_s = None if is_whole else began_s + BODY_TIMEOUT_S + num_bytes / BODY_BYTES_PER_S
            try:
                async with asyncio.timeout_at(limit_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body came too slowly", {"Connection": "close"}) from None
            size = len(message.get("body", b""))
            self._num_held, num_bytes = self._num_held + size, num_bytes + size
            if self._num_held > MAX_HELD_BYTES:
                raise HTTPException(429, "the bodies of other requests fill the memory; ask again later")
            is_whole = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._num_held -= num_bytes


class HttpServer(uvicorn.Server):
    """A server of an application. It leaves signals to the process.

    Args:
        bound: where it listens; closed by its owner.
        idle_timeout_s: after which a connection without a next request is closed.
        shutdown_timeout_s: seconds that replies under way have to end after `stop`.
    """

    def __init__(
        self, app: ASGIApp, bound: socket.socket, *, idle_timeout_s: float = 30.0, shutdown_timeout_s: int = 1
    ) -> None:
        config = uvicorn.Config(
            BoundedBodies(app),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=idle_timeout_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=shutdown_timeout_s,
        )
        super().__init__(config)
        bound.listen(config.backlog)  # its URL may be told before it serves: connections wait
        self._bound = bound
        self.signal: int | None = None
        """Signal that has stopped it."""
        host, port = bound.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`."""
        await super().serve(sockets or [self._bound])

    def stop(self, signal: int | None = None) -> None:
        """End soon: the server looks at this several times a second."""
        self.signal, self.should_exit = self.signal or signal, True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Change no handler."""
        yield
