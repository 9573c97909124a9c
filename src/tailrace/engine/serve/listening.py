"""The HTTP server of a process that handles signals itself."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEADERS_TIMEOUT_S = 30.0
"""Seconds in which the headers of a request must come, after the connection or the reply before it."""


class Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Change no handler."""
        yield


class TimedProtocol(H11Protocol):
    """Closes connections that bring no request in time. uvicorn's own limit ends with the first byte."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._expect_request()
        super().on_response_complete()

    def _expect_request(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self.loop.call_later(HEADERS_TIMEOUT_S, self._close_after, self.cycle)

    def _close_after(self, last: RequestResponseCycle | None) -> None:
        if self.cycle is last:  # no request has begun since
            self.transport.close()
