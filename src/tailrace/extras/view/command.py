"""`tailrace view`: a page over the files of runs, served on this machine or written as one file."""

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import mutually_exclusive

from tailrace import clock
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.commands.tables import check_output, writing
from tailrace.errors import ConfigError
from tailrace.extras.view.document import check_installed, whole_page
from tailrace.extras.view.perfetto import write_perfetto
from tailrace.extras.view.run import RunView, open_runs

HOST = "127.0.0.1"
ONE_OF = Group("Where: one of", validator=mutually_exclusive)


def view(
    runs: tuple[Path, ...],
    /,
    *,
    port: Annotated[int, Parameter(group=ONE_OF)] = 0,
    output: Annotated[Path | None, Parameter(group=ONE_OF)] = None,
    perfetto: Annotated[Path | None, Parameter(group=ONE_OF)] = None,
    trust: bool = False,
) -> None:
    """Serve the page until a signal comes, or write a file.

    Args:
        runs: output directories of runs and simulations. They are only read; nothing in them is run.
        port: of 127.0.0.1, instead of a free one.
        output: an HTML file that has everything in it, instead of serving.
        perfetto: a JSON file with the events of one run for ui.perfetto.dev, instead of serving.
        trust: import schedules of your own that the runs name, to predict a faster one.
    """
    check_output("--output", output, "<title>tailrace</title>")
    check_output("--perfetto", perfetto, r'\A\[\n{"name":"process_name"')
    if perfetto:
        _write_perfetto(runs, perfetto)
        return
    if output is None:
        check_installed()
    opened = open_runs(runs, wait=output is None, trust=trust)
    if output:
        with writing("--output", output):
            output.write_text(whole_page(opened), encoding="utf-8")
        print(f"page      {output}")
    else:
        _serve(opened, port)


def _write_perfetto(folders: Sequence[Path], path: Path) -> None:
    logs = [folder / "events.jsonl" for folder in folders]
    if len(logs) > 1 or not logs[0].exists():
        if len(logs) == 1:
            RunFolder(folders[0]).check_wrote("an events.jsonl", "train", "simulate")
        problem = "it has no events.jsonl" if len(logs) == 1 else "a trace is of one run"
        where = ", ".join(map(str, folders))
        raise ConfigError("RUN", where, problem, "name the output directory of one run")
    with writing("--perfetto", path):
        write_perfetto(logs[0], path)
    print(f"trace     {path}  (open it at ui.perfetto.dev)")


def _serve(runs: Sequence[RunView], port: int) -> None:
    from tailrace.extras.serve.listening import HttpServer, bind
    from tailrace.extras.view.app import make_app

    if not 0 <= port < 2**16:
        raise ConfigError("--port", port, "there is no such port", "choose from 0 to 65535")
    with bind(HOST, port, "--port") as bound:
        token = secrets.token_urlsafe(24)
        server = HttpServer(make_app(runs, token), bound)
        with signals_received(server.stop):
            print(f"serving   {server.url}/{token}/   (Ctrl+C ends it)", flush=True)
            clock.run(server.serve(), virtual=False)
    print("tailrace: the page is no longer served", file=sys.stderr)
