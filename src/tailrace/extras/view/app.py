"""The server of the page: GET only, for this machine and who has its address only, and it writes nothing.

The handlers are plain functions, which Starlette runs in threads: figures are answered while a long run log
is read for the first time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from math import isfinite

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from tailrace.extras.view.document import SCRIPTS, served_page, static_text
from tailrace.extras.view.run import RunView

HOSTS = ("127.0.0.1", "localhost")
"""Names in the Host header. A page of another site that makes its own name mean this machine is refused."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data: blob:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
MAX_BINS = 4_000
REFUSED = "open the address that tailrace view printed: it has a token"


def make_app(runs: Sequence[RunView], token: str) -> Starlette:
    """The application, below /TOKEN/: the machine may have other users, who can reach the port. A run's files
    are read when the page asks."""

    def answer(path: str, ask: Callable[[RunView, Request], object]) -> Route:
        def endpoint(request: Request) -> Response:
            number = int(request.path_params["run"])
            if number >= len(runs):
                raise HTTPException(404, f"there are {len(runs)} runs")
            return _encoded(ask(runs[number], request), request)

        return Route(f"/runs/{{run:int}}{path}", endpoint, methods=["GET"])

    routes = [
        _text_route("/", "text/html", lambda: served_page(len(runs))),
        *(_text_route(f"/{name}", "text/javascript", partial(static_text, name)) for name in SCRIPTS),
        answer("", lambda run, _: run.figures()),
        answer("/record", lambda run, _: run.record()),
        answer("/faster", lambda run, _: run.faster()),
        answer("/figure", lambda run, request: run.figure(request.query_params.get("name", ""))),
        answer("/window", _window),
        answer("/samples", _samples),
        answer("/sample", lambda run, request: run.sample(request.query_params.get("id", ""))),
    ]
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)
    refused = Route("/{path:path}", lambda _: Response(REFUSED, 403))
    return Starlette(routes=[Mount(f"/{token}", routes=routes), refused], middleware=[guard])


def _encoded(found: object, request: Request) -> Response:
    """An answer as JSON, or that it is the one which the browser has."""
    body = msgspec.json.encode(found)
    etag = f'"{blake2b(body, digest_size=16).hexdigest()}"'
    headers = HEADERS | {"Cache-Control": "no-cache", "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def _window(run: RunView, request: Request) -> object:
    start_s, end_s, bins = (_number(request, name) for name in ("from", "to", "bins"))
    if not end_s > start_s or not 1 <= bins <= MAX_BINS:
        raise HTTPException(
            400, f"from = {start_s:g}, to = {end_s:g}, bins = {bins:g}: there is no such range"
        )
    return run.window(start_s, end_s, int(bins))


def _samples(run: RunView, request: Request) -> object:
    asked = request.query_params
    last_round = int(_number(request, "last_round")) if "last_round" in asked else None
    return run.samples(asked.get("kind", "trained"), last_round, asked.get("search", ""))


def _number(request: Request, name: str) -> float:
    text = request.query_params.get(name, "")
    try:
        if isfinite(number := float(text)):
            return number
    except ValueError:
        pass
    raise HTTPException(400, f"{name} = {text!r}: it is no number")


def _text_route(path: str, kind: str, text: Callable[[], str]) -> Route:
    def answer(request: Request) -> Response:
        return Response(text(), media_type=kind, headers=HEADERS)

    return Route(path, answer, methods=["GET"])
