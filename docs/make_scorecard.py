"""Writes docs/reference/scorecard.md: each printed or measured figure beside what a release predicts.

    python -m reproductions NAME --seeds 5 --json reproductions/results/0.1.0/NAME.json
    python docs/make_scorecard.py docs/reference/scorecard.md

The papers' rows come from reproductions/results/RELEASE/NAME.json, the others from docs/scorecard.toml. A new
paper is a new file, a new release a new folder. A test compares the committed page with the output.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

DATA = Path(__file__).parent / "scorecard.toml"
RESULTS = Path(__file__).parents[1] / "reproductions" / "results"
KINDS = ("predicted", "determined", "definition", "fitted")
INTRODUCTION = """\
# Scorecard

Each printed or measured figure beside ours, with the error: a column a release, the worst first. *Predicted*:
nothing was chosen to meet it. *Determined*: it follows from fitted figures or from other rows by arithmetic.
*Fitted*: a parameter was chosen to meet it. Of a range the middle counts; *inside*: ours is in the range. The
class is that of the newest release; a row that had another one is listed with the reason.
"""


def read_data() -> dict[str, Any]:
    """Return the releases and the parts, as docs/scorecard.toml explains them."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    data["releases"] = sorted({*data["releases"], *(folder.name for folder in RESULTS.iterdir())})
    parts: dict[str, dict[str, Any]] = {}
    for release in data["releases"]:
        for path in sorted((RESULTS / release).glob("*.json")):
            _add(parts, json.loads(path.read_text(encoding="utf-8")), release)
    return data | {"part": [*data["part"], *parts.values()]}


def _add(parts: dict[str, dict[str, Any]], paper: dict[str, Any], release: str) -> None:
    """Add a release's figures of a paper, in the form of the rows of docs/scorecard.toml."""
    name = paper["paper"]
    command = f"python -m reproductions {name} --seeds {paper['seeds']}"
    part = parts.setdefault(name, {"title": name, "row": []}) | {"command": command}
    rows = {row["what"]: row for row in part["row"]}
    for number, figures in paper["tables"].items():
        for figure in figures:
            if figure["printed"] is None:
                continue
            what = ", ".join(filter(None, (number, figure["row"], figure["what"])))
            unit = figure["unit"] if figure["unit"] in ("", "%", "x") else f" {figure['unit']}"
            row = rows.setdefault(what, {"what": what})
            row |= {"measured": figure["printed"], "unit": unit, "kind": figure["kind"]}
            row[release] = figure["ours"]
            row["kinds"] = row.get("kinds", {}) | {release: figure["kind"]}
    parts[name] = part | {"row": list(rows.values())}


def scorecard(data: dict[str, Any]) -> str:
    """Return the page as Markdown. `data`: releases, and parts with rows, as docs/scorecard.toml explains."""
    parts = [INTRODUCTION.strip(), *(_part(each, data["releases"]) for each in data["part"])]
    parts += [_changes(data["part"], data.get("reclassified", []))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _changes(parts: list[dict[str, Any]], reasons: list[dict[str, str]]) -> str:
    """Return the rows whose class differs between releases, each with its reason. Raises a LookupError if a
    row has none."""
    lines = []
    for part in parts:
        for row in part["row"]:
            kinds = [*dict.fromkeys(row.get("kinds", {}).values())]
            if len(kinds) > 1:
                found = [each["why"] for each in reasons if re.search(each["rows"], row["what"])]
                if not found:
                    raise LookupError(f"{part['title']}, {row['what']}: no reason for its class {kinds[-1]}")
                lines.append(_line(part["title"], row["what"], " to ".join(kinds), found[0]))
    head = ["## Rows of another class", "", _line("", "", "class", "reason"), "|---" * 4 + "|"]
    return "\n".join([*head, *lines]) if lines else ""


def _part(part: dict[str, Any], releases: list[str]) -> str:
    lines = [f"## {part['title']}", "", f"`{part['command']}`", ""]
    lines += [_line("", "", "measured", *releases), "|---" * (3 + len(releases)) + "|"]
    for kind in KINDS:
        of_kind = [row for row in part["row"] if _kind(row) == kind]
        lines += [_row(row, releases) for row in sorted(of_kind, key=lambda row: _badness(row, releases))]
    predicted = [row for row in part["row"] if _kind(row) == "predicted"]
    single = [row for row in predicted if not isinstance(row.get("measured"), list)]
    lines.append(_medians("median error, predicted", predicted, releases))
    if 0 < len(single) < len(predicted):
        lines.append(_medians("the same without ranges", single, releases))
    first = [row for row in part["row"] if next(iter(row.get("kinds", {}).values()), None) == "predicted"]
    if first and first != predicted:
        lines.append(_medians(f"the rows that {releases[0]} predicts", first, releases))
    return "\n".join([*lines, *(["", part["note"]] if "note" in part else [])])


def _medians(what: str, rows: list[dict[str, Any]], releases: list[str]) -> str:
    cells = []
    for release in releases:
        errors = [abs(each) for row in rows if (each := error(row, release)) is not None]
        cells.append(f"{median(errors):.1f}% of {len(errors)}" if errors else "")
    return _line("", what, "", *cells)


def _badness(row: dict[str, Any], releases: list[str]) -> float:
    """The key of the worst row first: by the newest release that has the row."""
    newest = next(each for each in reversed(releases) if each in row)
    return -abs(error(row, newest) or 0.0)


def _row(row: dict[str, Any], releases: list[str]) -> str:
    cells = [_cell(row, each) if each in row else "" for each in releases]
    return _line(_kind(row), row["what"], _value(row["measured"], row) if "measured" in row else "", *cells)


def _kind(row: dict[str, Any]) -> str:
    return str(row.get("kind", "predicted"))


def _cell(row: dict[str, Any], release: str) -> str:
    off = error(row, release)
    found = "" if off is None else f"{round(off):+d}%"
    if "measured" not in row:
        return found
    measured, ours = row["measured"], row[release]
    is_inside = (
        isinstance(measured, list) and not isinstance(ours, list) and measured[0] <= ours <= measured[1]
    )
    return f"{_value(ours, row)}: {found}".removesuffix(": ") + ", inside" * is_inside


def error(row: dict[str, Any], release: str) -> float | None:
    """Of a prediction, in % of what was measured; of ranges, the middles count. A row without a measurement
    has the error itself. None: the release does not predict the row, or nothing was measured."""
    if release not in row:
        return None
    if "measured" not in row:
        return float(row[release])
    measured = _middle(row["measured"])
    return 100 * (_middle(row[release]) / measured - 1) if measured else None


def _middle(value: Any) -> float:
    return sum(value) / 2 if isinstance(value, list) else float(value)


def _value(value: Any, row: dict[str, Any]) -> str:
    numbers = value if isinstance(value, list) else [value]
    return " to ".join(_number(each) for each in numbers) + str(row.get("unit", ""))


def _number(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Iterable[str]) -> None:
    """Write the page to each path given."""
    for path in arguments:
        Path(path).write_text(scorecard(read_data()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
