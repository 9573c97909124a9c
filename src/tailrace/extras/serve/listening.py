"""The one set-up of HTTP servers: `tailrace serve`, the sessions of agents, and `tailrace view`."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from tailrace.clock import now
from tailrace.drivers.workers.strangers import BACKLOG, Door, Strangers, raise_file_limit
from tailrace.errors import ConfigError

HEADER_TIMEOUT_S, HEADER_GRACE_S, MAX_CONNECTIONS = 30.0, 5.0, 2**13
"""Limits of the time until a header is complete, from the connection or its first byte on; the second one
while others wait, as clients that come by the hundred connect first and speak then. And of the connections
of a server, which has at most half of the descriptors of its process."""
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


def is_foreign(scope: Scope) -> bool:
    """Return whether a page of another site sends a request, as its browser says: to open the page of a link
    it may. Another port of this machine is another site. What is no browser says nothing."""
    headers = Headers(scope=scope)
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None:  # an old browser, or no address of this machine and no TLS
        return origin not in (None, f"{scope['scheme']}://{headers.get('host', '')}")
    opens = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return site not in ("same-origin", "none") and not (opens and scope["method"] == "GET")


class Guard:
    """An application that answers no page of another site, and whose bodies come in time and do not fill the
    memory: its route gets HTTPException."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._num_held = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if is_foreign(scope):
            await PlainTextResponse("a page of another site may not use this server", 403)(
                scope, receive, send
            )
            return
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


class HttpConnection(H11Protocol):
    """A connection that is a stranger until the header of its request is complete. Of more connections than
    `limit` the oldest stranger is closed, or else the one that has waited longest for a next request."""

    def __init__(self, strangers: Strangers, limit: int, *given: Any) -> None:
        super().__init__(*given)
        self._strangers, self._limit = strangers, limit

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._strangers.add(transport)
        if len(self.connections) > self._limit:
            every: set[Any] = self.connections  # of this class
            idle = [each for each in every if each.timeout_keep_alive_task]
            if idle and len(self._strangers) == 1:
                min(idle, key=lambda each: each.timeout_keep_alive_task.when()).transport.abort()
            else:
                self._strangers.drop_oldest()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.remove(self.transport)
        super().connection_lost(exc)

    @override
    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            self._strangers.add(self.transport)
        else:
            self._strangers.remove(self.transport)


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
        self._strangers = Strangers(HEADER_TIMEOUT_S, HEADER_GRACE_S)
        self._limit = min(MAX_CONNECTIONS, raise_file_limit() // 2)
        config = uvicorn.Config(
            Guard(app),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=idle_timeout_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=shutdown_timeout_s,
        )
        super().__init__(config)
        bound.listen(BACKLOG)  # its URL may be told before it serves: connections wait
        self._bound = bound
        self.signal: int | None = None
        """Signal that has stopped it."""
        host, port = bound.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        of_server = (self.config, self.server_state, self.lifespan.state)
        make = partial(HttpConnection, self._strangers, self._limit, *of_server)
        self.servers = [Door(make, [self._bound], self._strangers)]  # type: ignore[list-item]
        self.started = True

    def stop(self, signal: int | None = None) -> None:
        """End soon: the server looks at this several times a second."""
        self.signal, self.should_exit = self.signal or signal, True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Change no handler."""
        yield
