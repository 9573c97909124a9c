"""A server with one run of W&B, as far as W&B's client asks for its history."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

RUN, KEY = "me/proj/abc", "0" * 40
_VIEWER = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}


@contextmanager
def serving(rows: Sequence[dict[str, float]] | None, *, key_is_known: bool = True) -> Iterator[str]:
    """Serve a run with these rows, None: gone when they are asked for; yields the address of the server."""
    last = 3 if rows is None else len(rows) - 1

    def run(asked: dict[str, Any]) -> dict[str, Any] | None:
        if "parquetHistory" in asked["query"]:
            return {"parquetHistory": {"parquetUrls": [], "liveData": []}}
        if "history(" in asked["query"]:
            history = [json.dumps(row | {"_step": step}) for step, row in enumerate(rows or ())]
            first, stop = (asked["variables"][name] for name in ("minStep", "maxStep"))
            return {"history": history[first:stop]} if history else None
        known = {"id": "1", "name": "abc", "projectId": "1", "state": "finished", "config": "{}"}
        return known | {"summaryMetrics": "{}", "systemMetrics": "{}", "historyKeys": {"lastStep": last}}

    def data(asked: dict[str, Any]) -> dict[str, Any]:
        if "viewer" in asked["query"]:
            return {"viewer": _VIEWER if key_is_known else None}
        names = asked["variables"]
        name = next(names[key] for key in ("name", "runName", "run") if key in names)
        is_it = f"{names['entity']}/{names['project']}/{name}" == RUN
        return {"project": {"run": run(asked)} if is_it else None}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = json.dumps({"data": data(json.loads(body))} if self.path == "/graphql" else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
