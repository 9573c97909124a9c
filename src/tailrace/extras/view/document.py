"""The page as HTML: served, with scripts beside it, or as one file that has everything in it."""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from string import Template
from typing import Any

import msgspec

from tailrace.errors import ConfigError
from tailrace.extras.view.run import RunView
from tailrace.importing import install

NUM_EMBEDDED = 100
"""Samples of each run that a file has in it: the newest ones, and the stragglers."""
EXTRA = install("view")


def check_installed() -> None:
    """Raises a ConfigError if a package of the page is missing."""
    for name in ("plotly", "starlette", "uvicorn"):
        if find_spec(name) is None:
            raise ConfigError("view", name, "this package is not installed", EXTRA)


@cache
def plotting_library() -> str:
    """The JavaScript of plotly, from its Python package."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


def own_script() -> str:
    return _static("page.js")


def served_page(num_runs: int) -> str:
    """The page that a server gives; it asks for the data itself."""
    head = '<script src="plotly.js"></script>'
    return _page(head, _data({"num_runs": num_runs}) + '<script src="page.js"></script>')


def whole_page(runs: Sequence[RunView]) -> str:
    """The page as one file, with the data of now. It needs no server and no network."""
    payloads = [run.payload() for run in runs]
    samples = [_embedded_samples(run, payload) for run, payload in zip(runs, payloads, strict=True)]
    data = _data({"num_runs": len(runs), "runs": payloads, "samples": samples})
    scripts = _inline(plotting_library())
    return _page(scripts, data + _inline(own_script()))


def _embedded_samples(run: RunView, payload: dict[str, Any]) -> dict[str, Any]:
    last = [str(straggler["sample"]) for straggler in reversed(payload["stragglers"])]
    ids: Iterable[str] = dict.fromkeys([*last[: NUM_EMBEDDED // 2], *run.ids_with_samples()])
    return {id: run.sample(id) for id in list(ids)[:NUM_EMBEDDED]}


def _page(head: str, body: str) -> str:
    return Template(_static("page.html")).substitute(style=_static("page.css"), head=head, body=body)


def _data(data: object) -> str:
    """A script element that holds data. A sample's text must not end it."""
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'


def _inline(script: str) -> str:
    return "<script>" + script.replace("</script", "<\\/script").replace("<!--", "<\\!--") + "</script>"


def _static(name: str) -> str:
    return (files("tailrace.extras.view") / "static" / name).read_text(encoding="utf-8")
