"""`tailrace playground`: schedules, simulated in a browser. The files are those of `make playground`."""

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tailrace.drivers.assembly.signals import signals_received
from tailrace.errors import ConfigError

HOST = "127.0.0.1"
BUILT = Path("build/playground")


class _Files(SimpleHTTPRequestHandler):
    """The files of a folder. A browser asks again whether one has changed: a build replaces them."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript"}

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for a request."""


def playground(*, folder: Path = BUILT, port: int = 0) -> None:
    """Serve the playground on this machine until a signal comes.

    Args:
        folder: what `make playground` has written. Any server of files can serve it.
        port: of 127.0.0.1; 0: a free one.
    """
    if not (folder / "index.html").is_file() or not (folder / "first.json").is_file():
        remedy = "run `make playground` in a checkout, or name the folder that it wrote"
        raise ConfigError("--folder", str(folder), "there is no playground in it", remedy)
    try:
        server = ThreadingHTTPServer((HOST, port), partial(_Files, directory=str(folder)))
    except (OSError, OverflowError) as why:
        raise ConfigError("--port", port, f"the server cannot listen there: {why}", "choose another") from why
    with server, signals_received(lambda _: Thread(target=server.shutdown).start()):
        print(f"serving   http://{HOST}:{server.server_port}/   (Ctrl+C ends it)", flush=True)
        server.serve_forever()
    print("tailrace: the playground is no longer served", file=sys.stderr)
