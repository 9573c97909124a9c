"""The server of the page: GET only, for this machine only, and it writes nothing."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.page.document import own_script, plotting_library, served_page
from tailrace.page.run import Have, RunView

HOSTS = ("127.0.0.1", "localhost")
"""Names in the Host header. A page of another site that makes its own name mean this machine is refused."""
HEADERS = {
    # The plotting library compiles functions.
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'unsafe-eval'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data: blob:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(runs: Sequence[RunView]) -> Starlette:
    """The application. A run's files are read when the page asks."""

    def run_of(request: Request) -> RunView:
        number = int(request.path_params["run"])
        if number >= len(runs):
            raise HTTPException(404, f"there are {len(runs)} runs")
        return runs[number]

    async def page(request: Request) -> Response:
        return _response(served_page(len(runs)), "text/html")

    async def library(request: Request) -> Response:
        return _response(plotting_library(), "text/javascript")

    async def script(request: Request) -> Response:
        return _response(own_script(), "text/javascript")

    async def data(request: Request) -> Response:
        run = run_of(request)
        try:
            have = msgspec.convert(dict(request.query_params), Have, strict=False)
        except msgspec.ValidationError as why:
            raise HTTPException(400, str(why)) from why
        run.update()
        return _json(run.payload(have))

    async def sample(request: Request) -> Response:
        run = run_of(request)
        run.update()  # a resumed run may have written the samples' files anew
        return _json(run.sample(request.query_params.get("id", "")))

    routes = [
        Route("/", page, methods=["GET"]),
        Route("/plotly.js", library, methods=["GET"]),
        Route("/page.js", script, methods=["GET"]),
        Route("/runs/{run:int}", data, methods=["GET"]),
        Route("/runs/{run:int}/sample", sample, methods=["GET"]),
    ]
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)
    return Starlette(routes=routes, middleware=[guard])


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", headers=HEADERS)


def _response(content: str, kind: str) -> Response:
    return Response(content, media_type=kind, headers=HEADERS)
