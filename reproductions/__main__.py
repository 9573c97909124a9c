"""`python -m reproductions NAME`: a paper's tables beside ours."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from reproductions.base import Figure, Paper, Table
from tailrace.errors import ConfigError

PAPERS = ("rolloutpipe", "april", "pipelinerl", "rollpacker")
"""Files beside this one."""


def simulate_paper(name: str, *, number: str | None = None, json_path: Path | None = None) -> None:
    """Simulate the tables of a paper and print them.

    Args:
        number: of one table, as the paper numbers it, with or without "Table" and "Fig.".
        json_path: a file for the figures.

    Raises:
        ConfigError: there is no such paper or table, or no folder for the file.
    """
    paper = _paper(name)
    if json_path and not json_path.parent.is_dir():
        problem = f"there is no folder {json_path.parent}"
        raise ConfigError("--json", str(json_path), problem, "choose a file in an existing folder")
    console = Console()
    console.print(paper.citation, *paper.set_up, sep="\n", highlight=False)
    tables = []
    for wanted in _chosen(paper, number):
        tables.append(table := paper.tables[wanted]())
        console.print(_printed(table), *table.notes, sep="\n", highlight=False)
    figures = [figure for table in tables for figure in table.figures]
    console.print(
        f"{paper.num_fitted} parameters were fitted. Of the printed figures, {_count(figures, 'predicted')}"
        f" are predicted, {_count(figures, 'derived')} derived and {_count(figures, 'fitted')} fitted.",
        *paper.contradictions,
        sep="\n",
        highlight=False,
    )
    if json_path:
        json_path.write_text(json.dumps(_json(paper, tables), indent=1) + "\n")


def _paper(name: str) -> Paper:
    if name not in PAPERS:
        raise ConfigError("NAME", name, "it is not a paper of tailrace", f"choose from {', '.join(PAPERS)}")
    paper: Paper = import_module(f"reproductions.{name}").PAPER
    return paper


def _chosen(paper: Paper, number: str | None) -> list[str]:
    if number is None:
        return list(paper.tables)
    chosen = [each for each in paper.tables if number in (each, each.split()[-1])]
    if not chosen:
        problem = f"{paper.name} has no such table here"
        raise ConfigError("--table", number, problem, f"choose from {', '.join(paper.tables)}")
    return chosen


def _count(figures: list[Figure], kind: str) -> int:
    return sum(figure.kind == kind and figure.printed is not None for figure in figures)


def _printed(table: Table) -> RichTable:
    rich = RichTable(
        "", "", "paper", "ours", "", "bar", title=f"{table.number}: {table.title}", title_justify="left"
    )
    for figure in table.figures:
        verdict = {None: "", True: "holds", False: "misses"}[figure.holds]
        bar = "" if figure.tolerance is None else f"within {figure.tolerance:g} {figure.unit}: {verdict}"
        row = (figure.row, figure.what, _range(figure), _number(figure.ours, figure.unit), figure.kind, bar)
        rich.add_row(*row)
    return rich


def _range(figure: Figure) -> str:
    match figure.printed:
        case None:
            return "-"
        case (low, high):
            return f"{_number(low, '')} to {_number(high, figure.unit)}"
        case single:
            return _number(single, figure.unit)


def _number(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def _json(paper: Paper, tables: list[Table]) -> dict[str, object]:
    return {
        "paper": paper.name,
        "num_fitted": paper.num_fitted,
        "tables": {
            table.number: [asdict(figure) | {"holds": figure.holds} for figure in table.figures]
            for table in tables
        },
        "contradictions": paper.contradictions,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of a paper; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m reproductions", description=__doc__)
    parser.add_argument("name", metavar="NAME", help=", ".join(PAPERS))
    parser.add_argument("--table", metavar="N", help="only this table or figure, by the paper's number of it")
    parser.add_argument("--json", type=Path, metavar="F", help="a file for the figures")
    arguments = parser.parse_args(argv)
    try:
        simulate_paper(arguments.name, number=arguments.table, json_path=arguments.json)
    except ConfigError as why:
        print(f"tailrace: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
