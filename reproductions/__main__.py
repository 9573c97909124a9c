"""`python -m reproductions NAME`: a paper's tables beside ours."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from reproductions.base import Paper, Span, Table, count, over_seeds
from tailrace.drivers.commands.tables import check_output
from tailrace.errors import ConfigError

PAPERS = ("rolloutpipe", "april", "pipelinerl", "rollpacker", "verl", "dora", "laminar", "peers", "staleness")
"""Files beside this one."""
INNERMOST = re.compile(r"\{[^{}]+\}")
COUNTED = (
    "Of the parameters, {printed} are printed, {fitted} fitted and {assumed} assumed.",
    "Of the {printed} printed figures, {predicted} are predicted ({predicted_ranges} of these are ranges),"
    " {determined} determined by others, {definition} definitions, {fitted} fitted; {not_printed} are ours.",
)


def simulate_paper(name: str, number: str | None, json_path: Path | None, seeds: int) -> None:
    """Simulate the tables of a paper, print them, and write them to a file if one is given.

    Args:
        number: of one table, as the paper numbers it, with or without "Table" and "Fig."; None: all.
        seeds: how many, from 0 on; figures are means over them.

    Raises:
        ConfigError: there is no such paper or table, no folder for the file, or no seed.
    """
    if name not in PAPERS:
        raise ConfigError("NAME", name, "it is not a paper of tailrace", f"choose from {', '.join(PAPERS)}")
    check_output("--json", json_path, r'\A{\s*"seeds": ')
    if seeds < 1:
        raise ConfigError("--seeds", seeds, "a figure needs one", "choose 1 or more")
    paper: Paper = import_module(f"reproductions.{name}").PAPER
    chosen = [each for each in paper.tables if number in (None, each, each.split()[-1])]
    if not chosen:
        problem = f"{paper.name} has no such table here"
        raise ConfigError("--table", number, problem, f"choose from {', '.join(paper.tables)}")
    say = partial(Console().print, sep="\n", highlight=False)
    say(paper.citation, *paper.set_up, *map(str, paper.parameters))
    tables = []
    for each in chosen:
        tables.append(table := over_seeds(paper.tables[each], range(seeds)))
        say(_printed(table), *table.notes)
    figures = count([figure for table in tables for figure in table.figures])
    counts = paper.num_parameters, figures
    say(*(text.format(**numbers) for text, numbers in zip(COUNTED, counts, strict=True)))
    say(*paper.contradictions, f"Not attempted: {paper.not_attempted}")
    if json_path:
        written = {"seeds": seeds, "counts": {"parameters": paper.num_parameters, "figures": figures}}
        text = json.dumps(written | _json(paper, tables), indent=1)
        text = INNERMOST.sub(lambda found: " ".join(found[0].split()), text)  # a figure is a line
        json_path.write_text(text + "\n", encoding="utf-8")


def _printed(table: Table) -> RichTable:
    title = f"{table.number}: {table.title}"
    rich = RichTable("", "", "paper", "ours", "", "bar", title=title, title_justify="left")
    for figure in table.figures:
        verdict = {None: "", True: "holds", False: "misses"}[figure.holds]
        bar = "" if figure.tolerance is None else f"within {figure.tolerance:.3g} {figure.unit}: {verdict}"
        ours = _range(figure.ours, figure.unit)
        ours += "" if figure.deviation is None else f" \N{PLUS-MINUS SIGN} {_range(figure.deviation, '')}"
        ours += f" ({_range(figure.spread, '')})" if figure.spread else ""
        rich.add_row(figure.row, figure.what, _range(figure.printed, figure.unit), ours, figure.kind, bar)
    return rich


def _range(number: float | Span | None, unit: str) -> str:
    match number:
        case None:
            return "-"
        case (low, high):
            return f"{_range(low, '')} to {_range(high, unit)}"
        case single:
            return (f"{single:,.0f}" if abs(single) >= 1000 else f"{single:.4g}") + f" {unit}".rstrip()


def _json(paper: Paper, tables: list[Table]) -> dict[str, object]:
    return {
        "paper": paper.name,
        "num_fitted": paper.num_fitted,
        "parameters": [each._asdict() for each in paper.parameters],
        "tables": {
            table.number: [asdict(figure) | {"holds": figure.holds} for figure in table.figures]
            for table in tables
        },
        "contradictions": paper.contradictions,
        "not_attempted": paper.not_attempted,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of a paper; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m reproductions", description=__doc__)
    parser.add_argument("name", metavar="NAME", help=", ".join(PAPERS))
    parser.add_argument("--table", metavar="N", help="only this table or figure, by the paper's number of it")
    parser.add_argument("--json", type=Path, metavar="F", help="a file for the figures")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="mean and spread over N seeds")
    words = parser.parse_args(argv)
    try:
        simulate_paper(words.name, words.table, words.json, words.seeds)
    except ConfigError as why:
        print(f"tailrace: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
