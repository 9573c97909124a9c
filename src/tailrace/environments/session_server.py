"""The HTTP server of the sessions, on loopback, in the controller's process."""

import asyncio
import itertools
import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp

from tailrace.data.encoding import Tokenizer
from tailrace.engine.serve.errors import add_error_handlers
from tailrace.engine.serve.guard import Guard, error_body
from tailrace.engine.serve.listening import Server
from tailrace.environments.chat_replies import Replies
from tailrace.environments.chat_requests import SessionRequest
from tailrace.environments.contexts import Contexts
from tailrace.environments.session import Refused, Session
from tailrace.environments.settings import MODEL
from tailrace.environments.tool_calls import Parse

PREFIX = "/sessions/"
MAX_BODY_BYTES = 32 * 2**20
KEEP_ALIVE_S = 600
"""Agents think and act between two requests of a connection."""


class SessionServer:
    """Serves /sessions/<name>/v1/chat/completions and /sessions/<name>/v1/models.

    Args:
        tokenizer: for log-probs in replies.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._sessions: dict[str, Session] = {}
        self._names = map(str, itertools.count(1))
        self._replies = Replies(MODEL, tokenizer)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._app(), log_level="warning", access_log=False, lifespan="off", ws="none", loop="none"
        )
        config.timeout_keep_alive, config.timeout_graceful_shutdown = KEEP_ALIVE_S, 1
        self._server = Server(config)
        self._serving: asyncio.Task[None] | None = None

    @contextmanager
    def session(self, contexts: Contexts, parse: Parse) -> Iterator[Session]:
        """Open a session and close it with the block."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._server.serve([self._socket]))
        session = Session(next(self._names), secrets.token_urlsafe(24), contexts, parse)
        self._sessions[session.name] = session
        try:
            yield session
        finally:
            del self._sessions[session.name]
            session.close()

    def url(self, session: Session) -> str:
        """What an OpenAI client takes as its base URL."""
        return f"{self._url}{PREFIX}{session.name}/v1"

    async def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        if self._serving:
            with suppress(asyncio.CancelledError):
                await self._serving
        self._socket.close()

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        @app.post(PREFIX + "{name}/v1/chat/completions")
        async def chat(name: str, body: SessionRequest) -> Response:
            turn = await self._find(name).ask(body)
            if body.stream:
                return StreamingResponse(self._replies.events(turn, body), media_type="text/event-stream")
            return Response(self._replies.whole(turn, body), media_type="application/json")

        @app.get(PREFIX + "{name}/v1/models")
        async def models(name: str) -> dict[str, object]:
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tailrace"}
            return {"object": "list", "data": [card]}

        app.add_middleware(_SessionGuard, sessions=self._sessions)
        add_error_handlers(app)
        app.add_exception_handler(Refused, _refuse)
        return app

    def _find(self, name: str) -> Session:
        try:
            return self._sessions[name]
        except KeyError:
            raise Refused("session_closed", "the session is closed") from None


class _SessionGuard(Guard):
    """Lets a request pass that bears the key of its session."""

    def __init__(self, app: ASGIApp, sessions: dict[str, Session]) -> None:
        super().__init__(app, token="", max_body_bytes=MAX_BODY_BYTES, all_guarded=True)
        self._sessions = sessions

    def allows(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """As Guard.allows."""
        session = self._sessions.get(path.removeprefix(PREFIX).partition("/")[0])
        key = session.key if session and path.startswith(PREFIX) else secrets.token_urlsafe(24)
        return secrets.compare_digest(headers.get(b"authorization", b""), f"Bearer {key}".encode())


def _refuse(request: Request, why: Exception) -> Response:
    assert isinstance(why, Refused)
    body = error_body(400, str(why))
    body["error"]["code"] = why.code
    return Response(json.dumps(body), 400, media_type="application/json")
