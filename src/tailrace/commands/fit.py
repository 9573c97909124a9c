"""`tailrace fit`: a live run's own costs as the [sim] section of a config."""

from collections.abc import Sequence
from pathlib import Path

import tomli_w
from rich.console import Console
from rich.table import Column, Table

from tailrace.commands.folder import RunFolder
from tailrace.config import RunConfig, load_config
from tailrace.errors import ConfigError
from tailrace.fit.fit import Fit, fit


def fit_run(path: Path, *, output: Path | None = None) -> None:
    """Fit a run, and print what was found.

    Args:
        path: the output directory of the run.
        output: where the [sim] section goes; None: it is printed.

    Raises:
        ConfigError: there is no run, one of its files is damaged, or the section cannot be written.
    """
    fitted = fitted_run(path)
    text = tomli_w.dumps(fitted.tree)
    console = Console()
    console.print(_table(path, fitted))
    for note in _notes(fitted):
        console.print(f"note: {note}", markup=False, highlight=False)
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text)
    except OSError as why:
        problem = f"it cannot be written ({why.strerror})"
        raise ConfigError("--output", str(output), problem, "choose another file") from None
    console.print(f"[sim] is in {output}", markup=False)


def fitted_run(path: Path) -> Fit:
    """Fit a run.

    Raises:
        ConfigError: there is no run, or one of its files is damaged.
    """
    folder = RunFolder(path)
    folder.require_run()
    config = load_config(folder.config)
    return fit(_traces(folder), folder.metrics, folder.samples, _workers(config))


def like(config: RunConfig, path: Path) -> RunConfig:
    """Return the config with the fitted [sim] of a run in place of its own.

    Raises:
        ConfigError: there is no run, or one of its files is damaged.
    """
    return config.model_copy(update={"sim": fitted_run(path).sim})


def _traces(folder: RunFolder) -> list[Path]:
    """The first trace file of each life."""
    later = [int(each.stem.removeprefix("trace-")) for each in folder.path.glob("trace-*.json") if "." not in each.stem]
    found = [folder.trace(life) for life in (1, *sorted(later))]
    return [path for path in found if path.exists()]


def _workers(config: RunConfig) -> int:
    """Of a simulated run, those of [sim]."""
    return config.reward.workers if config.model else config.sim.rewards.workers


def _table(path: Path, fitted: Fit) -> Table:
    table = Table("of", "parameter", Column("value", justify="right"), Column("observations", justify="right"))
    table.add_column("variance explained", justify="right")
    table.title, table.title_justify = f"fit of {path}", "left"
    for part in fitted.parts:
        explained = "" if part.explained is None else f"{part.explained:.1%}"
        rows = [(key, _cell(value)) for key, value in part.values.items()] or [("", "")]
        for number, (key, value) in enumerate(rows):
            once = (part.name, f"{part.observations:,}", explained) if not number else ("", "", "")
            table.add_row(once[0], key, value, once[1], once[2])
    return table


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "recorded" if isinstance(value, dict) else str(value)


def _notes(fitted: Fit) -> Sequence[str]:
    return [*fitted.notes, *(f"{part.name}: {note}" for part in fitted.parts for note in part.notes)]
