"""Writes docs/scorecard.md from the predictions and measurements in docs/scorecard.toml.

    python docs/make_scorecard.py docs/scorecard.md

A test compares the committed file with the output.
"""

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

DATA = Path(__file__).parent / "scorecard.toml"
INTRODUCTION = """\
# Scorecard

Predictions against measurements, with the error: a column a release. Of ranges, over seeds or settings, the
middles count. No row is fitted to its measurement. Papers: `python -m reproductions NAME --seeds 5`.
"""


def scorecard(data: dict[str, Any]) -> str:
    """Return the page as Markdown. `data`: releases, and parts with rows, as docs/scorecard.toml explains."""
    parts = [INTRODUCTION.strip(), *(_part(each, data["releases"]) for each in data["part"])]
    return "\n\n".join(parts) + "\n"


def _part(part: dict[str, Any], releases: list[str]) -> str:
    lines = [f"## {part['title']}", "", *([f"`{part['command']}`", ""] if "command" in part else [])]
    lines += [_line("", "measured", *releases), "|---" * (2 + len(releases)) + "|"]
    lines += [_row(row, releases) for row in part["row"]]
    middle = [median([abs(error(row, each)) for row in part["row"] if each in row]) for each in releases]
    lines.append(_line("median error", "", *(f"{each:.1f}%" for each in middle)))
    return "\n".join([*lines, *(["", part["note"]] if "note" in part else [])])


def _row(row: dict[str, Any], releases: list[str]) -> str:
    cells = [_cell(row, each) if each in row else "" for each in releases]
    return _line(row["what"], _value(row["measured"], row) if "measured" in row else "", *cells)


def _cell(row: dict[str, Any], release: str) -> str:
    found = f"{round(error(row, release)):+d}%"
    return f"{_value(row[release], row)}: {found}" if "measured" in row else found


def error(row: dict[str, Any], release: str) -> float:
    """Of a prediction, in % of what was measured; of ranges, the middles count. A row without a measurement
    has the error itself."""
    if "measured" not in row:
        return float(row[release])
    return 100 * (_middle(row[release]) / _middle(row["measured"]) - 1)


def _middle(value: Any) -> float:
    return sum(value) / 2 if isinstance(value, list) else float(value)


def _value(value: Any, row: dict[str, Any]) -> str:
    numbers = value if isinstance(value, list) else [value]
    return " to ".join(f"{each:g}" for each in numbers) + str(row.get("unit", ""))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Iterable[str]) -> None:
    """Write the page to each path given."""
    for path in arguments:
        Path(path).write_text(scorecard(tomllib.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
