"""`tailrace view`: a page over the files of runs, served on this machine or written as one file."""

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tailrace import clock
from tailrace.commands.signals import signals_received
from tailrace.errors import ConfigError
from tailrace.page.document import check_installed, whole_page
from tailrace.page.run import RunView, open_runs
from tailrace.record.perfetto import write_perfetto

HOST = "127.0.0.1"


def view(
    folders: Sequence[Path], *, port: int = 0, output: Path | None = None, perfetto: Path | None = None
) -> None:
    """Serve the page until a signal comes, or write a file.

    Args:
        folders: output directories of runs and simulations. They are only read.
        port: 0: a free one.
        output: write one file that has everything in it, and do not serve.
        perfetto: write the events of the one run for ui.perfetto.dev, and do not serve.

    Raises:
        ConfigError: a folder holds no run, a run log has a bad line, a package is missing, the port is in
            use, or the file cannot be written.
    """
    if perfetto:
        _write_perfetto(folders, perfetto)
        return
    check_installed()
    runs = open_runs(folders)
    for run in runs:
        run.update()
    if output:
        with _writing("--output", output):
            output.write_text(whole_page(runs), encoding="utf-8")
        print(f"page      {output}")
    else:
        _serve(runs, port)


def _write_perfetto(folders: Sequence[Path], path: Path) -> None:
    logs = [folder / "events.jsonl" for folder in folders]
    if len(logs) > 1 or not logs[0].exists():
        problem = "it has no events.jsonl" if len(logs) == 1 else "a trace is of one run"
        where = ", ".join(map(str, folders))
        raise ConfigError("RUN", where, problem, "name the output directory of one run")
    with _writing("--perfetto", path):
        write_perfetto(logs[0], path)
    print(f"trace     {path}  (open it at ui.perfetto.dev)")


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as why:
        problem = f"it cannot be written ({why.strerror})"
        raise ConfigError(option, str(path), problem, "choose another file") from why


def _serve(runs: Sequence[RunView], port: int) -> None:
    import uvicorn

    from tailrace.engine.serve.listening import Server
    from tailrace.page.app import make_app

    if not 0 <= port < 2**16:
        raise ConfigError("--port", port, "there is no such port", "choose from 0 to 65535")
    try:
        bound = socket.create_server((HOST, port))
    except OSError as why:
        problem = f"the server cannot listen there: {why}"
        raise ConfigError("--port", port, problem, "choose another") from why
    config = uvicorn.Config(make_app(runs), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    server = Server(config)

    def stop(signal: int) -> None:
        server.should_exit = True  # it looks at this several times a second

    with signals_received(stop), bound:
        print(f"serving   http://{HOST}:{bound.getsockname()[1]}   (Ctrl+C ends it)", flush=True)
        clock.run(server.serve([bound]), virtual=False)
    print("tailrace: the page is no longer served", file=sys.stderr)
