"""`tailrace view`: a page over the files of runs, served on this machine or written as one file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tailrace import clock
from tailrace.commands.signals import signals_received
from tailrace.errors import ConfigError
from tailrace.page.document import check_installed, whole_page
from tailrace.page.run import RunView, open_runs

HOST = "127.0.0.1"


def view(folders: Sequence[Path], *, port: int = 0, output: Path | None = None) -> None:
    """Serve the page until a signal comes, or write it.

    Args:
        folders: output directories of runs and simulations. They are only read.
        port: 0: a free one.
        output: write one file that has everything in it, and do not serve.

    Raises:
        ConfigError: a folder holds no run, a package is missing, the port is in use, or the file cannot be
            written.
    """
    check_installed()
    runs = open_runs(folders)
    if output is None:
        _serve(runs, port)
        return
    for run in runs:
        run.update()
    try:
        output.write_text(whole_page(runs), encoding="utf-8")
    except OSError as why:
        problem = f"it cannot be written ({why.strerror})"
        raise ConfigError("--output", str(output), problem, "choose another file") from why
    print(f"page      {output}")


def _serve(runs: Sequence[RunView], port: int) -> None:
    from tailrace.engine.serve.listening import HttpServer, bind
    from tailrace.page.app import make_app

    if not 0 <= port < 2**16:
        raise ConfigError("--port", port, "there is no such port", "choose from 0 to 65535")
    with bind(HOST, port, "--port") as bound:
        server = HttpServer(make_app(runs), bound)
        with signals_received(server.stop):
            print(f"serving   {server.url}   (Ctrl+C ends it)", flush=True)
            clock.run(server.serve(), virtual=False)
    print("tailrace: the page is no longer served", file=sys.stderr)
