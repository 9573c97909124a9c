"""What every request must pass before a route sees it: the token or the Host, and the limit on its body."""

import json
import secrets
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ALWAYS_OPEN = frozenset({"/health"})
OPEN = ALWAYS_OPEN | {
    "/version",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/inference/v1/generate",
    "/server_info",
    "/get_world_size",
    "/is_paused",
    "/is_sleeping",
    "/weight_info",
}
"""Routes that change neither weights nor state. All others need the token, unknown ones too."""


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names_this_machine(host: bytes) -> bool:
    """Whether a Host header does. A page of another site that makes its own name mean this machine sends that
    name."""
    try:
        return is_loopback(urlsplit(f"//{host.decode('latin-1')}").hostname or "")
    except ValueError:
        return False


class Guard:
    """ASGI middleware.

    Args:
        token: what a request must bear in its Authorization header.
        all_guarded: every route but /health needs the token.
    """

    def __init__(self, app: ASGIApp, *, token: str, max_body_bytes: int, all_guarded: bool) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._expected = f"Bearer {token}".encode()
        self._open = ALWAYS_OPEN if all_guarded else OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if not self.allows(scope["path"], headers):
            await self._drain(receive)
            await _refuse(send, 401, "this route needs the server's token: Authorization: Bearer TOKEN")
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            await _refuse(send, 413, self._too_large)
            return
        await self._app(scope, self._limited(receive), send)

    def allows(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request may reach its route."""
        if path in ALWAYS_OPEN or (path in self._open and _names_this_machine(headers.get(b"host", b""))):
            return True
        return secrets.compare_digest(headers.get(b"authorization", b""), self._expected)

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body_bytes} bytes"

    async def _drain(self, receive: Receive) -> None:
        """Read the body, because the connection is closed then: a client that still sends would lose the
        reply. One that sends too much loses it."""
        left, is_whole = self._max_body_bytes, False
        while not is_whole and left >= 0:
            message = await receive()
            left -= len(message.get("body", b""))
            is_whole = not message.get("more_body", False)

    def _limited(self, receive: Receive) -> Receive:
        """The same, until the body is too large: it may come in chunks, without a length."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return limited


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps(error_body(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
