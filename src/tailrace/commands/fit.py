"""`tailrace fit`: a live run's own costs as the [sim] section of a config."""

from pathlib import Path

import tomli_w
from rich.table import Column, Table

from tailrace.assembly.folder import RunFolder
from tailrace.commands.tables import open_console, print_table, writing
from tailrace.fit.fit import Fit, fit


def fit_run(run: Path, /, *, output: Path | None = None) -> None:
    """Fit a run, and print what was found.

    Args:
        run: its output directory.
        output: a file for the [sim] section; it is printed without one.
    """
    fitted = fitted_run(run)
    text = tomli_w.dumps(fitted.tree)
    console = open_console()
    print_table(console, _table(run, fitted), keep=2)
    for part in fitted.parts:
        for note in part.notes:
            console.print(f"note: {part.name}: {note}")
    if output is None:
        print(text, end="")
        return
    with writing("--output", output):
        output.write_text(text)
    console.print(f"[sim] is in {output}")


def fitted_run(path: Path) -> Fit:
    """Fit a run. Raises a ConfigError if there is no run, or one of its files is damaged."""
    folder = RunFolder(path)
    config = folder.read_config()
    workers = config.reward.workers if config.model else config.sim.rewards.workers
    return fit(folder.events, folder.metrics, folder.samples, workers)


def _table(path: Path, fitted: Fit) -> Table:
    table = Table("fitted", Column("parameter of [sim]", no_wrap=True), title=f"fit of {path}")
    for name in ("value", "observed", "explained"):
        table.add_column(name, justify="right")
    table.title_justify = "left"
    table.caption = "explained: share of the variance"
    for part in fitted.parts:
        once = [part.name, f"{part.observations:,}", _cell(part.explained, "{:.1%}")]
        for key, value in part.values.items():
            table.add_row(once[0], key.removeprefix("sim."), _cell(value, "{:.4g}"), *once[1:])
            once = ["", "", ""]
    return table


def _cell(value: object, form: str) -> str:
    match value:
        case None:
            return ""
        case float():
            return form.format(value)
        case dict():
            return str(value["kind"])
        case _:
            return str(value)
