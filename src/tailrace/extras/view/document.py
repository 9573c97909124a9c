"""The page as HTML: served, with scripts beside it, or as one file that has everything in it."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from string import Template
from typing import Any

import msgspec

from tailrace.errors import ConfigError
from tailrace.extras.view.run import RunView
from tailrace.importing import install

SCRIPTS = (
    *("vendor/uPlot.iife.min.js", "format.js", "words.js", "source.js", "charts.js", "lanes.js"),
    *("overview.js", "timeline.js", "samples.js", "accounts.js", "page.js"),
)
"""In the order in which they are run."""
STYLES = ("vendor/uPlot.min.css", "palette.css", "page.css")
NUM_EMBEDDED, NUM_LISTED = 100, 300
"""Samples of each run that a file has with all of their tokens, and in its list: the newest ones."""
NUM_BINS = 400
"""Parts of a range of time in the timeline of a file: one range is the whole run, one its last rounds."""
EXTRA = install("view")


def check_installed() -> None:
    """Raises a ConfigError if a package that serves the page is missing."""
    for name in ("starlette", "uvicorn"):
        if find_spec(name) is None:
            raise ConfigError("view", name, "this package is not installed", EXTRA)


@cache
def static_text(name: str) -> str:
    return (files("tailrace.extras.view") / "static" / name).read_text(encoding="utf-8")


def served_page(num_runs: int) -> str:
    """The page that a server gives; it asks for the data itself."""
    return _page(
        _data({"num_runs": num_runs}) + "".join(f'<script src="{name}"></script>' for name in SCRIPTS)
    )


def whole_page(runs: Sequence[RunView]) -> str:
    """The page as one file, with the data of now. It needs no server and no network."""
    data = _data({"num_runs": len(runs), "runs": [_embedded(run) for run in runs]})
    return _page(data + "".join(_inline(static_text(name)) for name in SCRIPTS))


def _embedded(run: RunView) -> dict[str, Any]:
    """Return what the scripts would ask a server for: the timeline in parts, and the newest samples."""
    figures, record = run.figures(), run.record()
    samples = {kind: run.samples(kind)["samples"][:NUM_LISTED] for kind in ("trained", "held-out", "failed")}
    ids = [row["id"] for kind in samples.values() for row in kind[:NUM_EMBEDDED]]
    end_s = max(record["end_s"], 1e-3)
    last_s = max(0.0, record["follow_s"] - 0.3 * (end_s - record["follow_s"]))  # with room to move
    return {
        "figures": figures
        | {"y": {name: run.figure(name) for name in figures["names"]}, "config": run.config(shared=True)},
        "record": record,
        "faster": run.faster(),
        "windows": [run.window(0.0, end_s, NUM_BINS), run.window(last_s, end_s, NUM_BINS)],
        "samples": samples,
        "sample": {id: each for id in ids[: 2 * NUM_EMBEDDED] if (each := run.sample(id))["source"]},
    }


def _page(body: str) -> str:
    style = "\n".join(map(static_text, STYLES))
    return Template(static_text("page.html")).substitute(style=style, body=body)


def _data(data: object) -> str:
    """A script element that holds data. A sample's text must not end it."""
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'


def _inline(script: str) -> str:
    return "<script>" + script.replace("</script", "<\\/script").replace("<!--", "<\\!--") + "</script>"
