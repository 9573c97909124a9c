"""The server of the page: GET only, for this machine only, and it writes nothing."""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.errors import ConfigError
from tailrace.extras.view.document import own_script, plotting_library, served_page
from tailrace.extras.view.run import RunView

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

    def updated(request: Request) -> RunView:
        run = run_of(request)
        try:
            run.update()
        except ConfigError as why:
            raise HTTPException(500, str(why)) from why
        return run

    async def data(request: Request) -> Response:
        body = msgspec.json.encode(updated(request).payload())
        etag = f'"{blake2b(body, digest_size=16).hexdigest()}"'
        headers = HEADERS | {"Cache-Control": "no-cache", "ETag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    async def sample(request: Request) -> Response:
        found = updated(request).sample(request.query_params.get("id", ""))
        return Response(msgspec.json.encode(found), media_type="application/json", headers=HEADERS)

    routes = [
        _text_route("/", "text/html", lambda: served_page(len(runs))),
        _text_route("/plotly.js", "text/javascript", plotting_library),
        _text_route("/page.js", "text/javascript", own_script),
        Route("/runs/{run:int}", data, methods=["GET"]),
        Route("/runs/{run:int}/sample", sample, methods=["GET"]),
    ]
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)
    return Starlette(routes=routes, middleware=[guard])


def _text_route(path: str, kind: str, text: Callable[[], str]) -> Route:
    async def answer(request: Request) -> Response:
        return Response(text(), media_type=kind, headers=HEADERS)

    return Route(path, answer, methods=["GET"])
