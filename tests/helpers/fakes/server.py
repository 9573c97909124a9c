"""A fake server on a socket of its own, in a thread of this process, so that a test reads its record."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any, Self

import uvicorn
from safetensors import safe_open
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from helpers.fakes.generations import GENERATIONS, Generation
from helpers.fakes.model import Model, Request
from helpers.fakes.page import Page


class Refusal(Exception):
    """The server answers with an error.

    Args:
        status: HTTP status.
        reply: the body.
    """

    def __init__(self, status: int, reply: Any) -> None:
        super().__init__(reply)
        self.status, self.reply = status, reply


class FakeServer:
    """The HTTP part that all servers share. Subclasses have a coroutine for each route, named after its path.

    Args:
        generation: a key of GENERATIONS.
        model: the folder of the model that it says it serves.
        hidden: routes that it does not have.
        vocabulary, slots, step_s, report_every: as in `Model`.
        max_context: tokens of a prompt and its completion together.
        event_delay_s: between the generation of tokens and the event of the stream that brings them.
    """

    def __init__(
        self,
        generation: str,
        model: Path,
        *,
        hidden: Collection[str] = (),
        dtype: str = "float32",
        vocabulary: int = 61,
        slots: int = 64,
        step_s: float = 0.001,
        report_every: int = 4,
        max_context: int = 65_536,
        event_delay_s: float = 0.0,
    ) -> None:
        self.generation: Generation = GENERATIONS[generation]
        self.folder, self.dtype, self.max_context = model, dtype, max_context
        self.event_delay_s = event_delay_s
        self.page = Page(generation, hidden)
        self.model = Model(vocabulary, slots, step_s, report_every)
        self.calls: list[str] = []
        self.metrics = ""
        """The page of that name."""
        """Paths of all requests but health checks, in order."""
        self.ignored: set[str] = set()
        """Fields of requests that this version does not know, and ignores as the real server does."""
        self.garbage = self.truncations = self.refusals = 0
        """Generations to come that are answered with no JSON, end early, or get 503."""
        self.failing_updates = 0
        """Updates to come that fail."""
        self.hung = False
        self.url = ""
        self._started = threading.Event()

    # -- its life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._thread.join(10)

    def die(self) -> None:
        """End like a killed process: connections break, and nothing answers any more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._die)

    def hang(self) -> None:
        """Answer nothing any more, and keep all connections."""
        self.hung = self.model.stopped = True

    def _die(self) -> None:
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        for server in self._uvicorn.servers:
            server.close()
        self._uvicorn.should_exit = self._uvicorn.force_exit = True

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            self._app, interface="asgi3", port=0, log_level="error", lifespan="off", timeout_keep_alive=60
        )
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        steps = asyncio.create_task(self.model.run())
        serving = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._started.set()
        await asyncio.wait([serving])
        steps.cancel()

    # -- one request -----------------------------------------------------------------------------------

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        try:
            reply = await self._answer(request)
        except Refusal as refusal:
            reply = JSONResponse(refusal.reply, refusal.status)
        await reply(scope, receive, send)

    async def _answer(self, request: HttpRequest) -> Response:
        path, method = request.url.path, request.method
        text = await request.body()
        if self.hung:
            await asyncio.Event().wait()
        if path == "/openapi.json":
            return JSONResponse(self.page.document)
        if path == "/metrics":
            return PlainTextResponse(self.metrics)
        if not self.page.has(method, path):
            raise Refusal(404, {"detail": "Not Found"})
        if path not in ("/health", "/is_paused", "/server_info", "/model_info"):
            self.calls.append(path)
        try:
            body = json.loads(text) if text else None
        except ValueError as error:
            raise Refusal(400, {"error": {"message": str(error), "code": 400}}) from None
        query = dict(request.query_params)
        if defect := self.page.defect(method, path, query, body):
            raise Refusal(400, {"error": {"message": defect, "type": "BadRequestError", "code": 400}})
        self.ignored |= self.page.unknown(method, path, query, body)
        handler = getattr(self, path.strip("/").replace("/", "_").replace(".", "_"))
        reply: Response = await handler(body if body is not None else {}, query)
        return reply

    async def stream(self, request: Request, events: AsyncIterator[Any]) -> AsyncIterator[str]:
        """Server-sent events. A client that goes away aborts its request."""
        garbled, truncated = self._due("garbage"), self._due("truncations")
        try:
            async for event in events:
                if garbled:
                    yield "data: <html>502 Bad Gateway</html>\n\n"
                    return
                if truncated and request.finish:
                    return
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.model.abort(request)

    async def deltas(self, request: Request) -> AsyncIterator[int]:
        """Yield the number of tokens that were sent before, whenever there are more, and at the end."""
        sent = 0
        while True:
            await request.changed.wait()
            await asyncio.sleep(self.event_delay_s)
            request.changed.clear()
            yield sent
            sent = len(request.tokens)
            if request.finish:
                return

    def generation_reply(self, request: Request, events: AsyncIterator[Any]) -> Response:
        return StreamingResponse(self.stream(request, events), media_type="text/event-stream")

    def refuse_if_due(self) -> None:
        if self._due("refusals"):
            raise Refusal(503, {"error": {"message": "overloaded", "code": 503}})

    def load(self, files: Collection[Path], version: int) -> str | None:
        """Read published tensors, as a model's loader does. Returns what is wrong with them."""
        if self._due("failing_updates"):
            return "the tensors did not arrive"
        own = _shapes(self.folder.glob("*.safetensors"))
        try:
            offered = _shapes(files)
        except (OSError, ValueError) as error:
            return str(error)
        if self.folder.exists() and offered != own:
            return f"the tensors are not those of the model: {sorted(offered.items() ^ own.items())[:2]}"
        self.model.version, self.model.has_weights = version, True
        return None

    def _due(self, what: str) -> bool:
        due = getattr(self, what)
        setattr(self, what, max(0, due - 1))
        return bool(due)


def _shapes(files: Collection[Path] | Any) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for file in files:
        with safe_open(file, "numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes
