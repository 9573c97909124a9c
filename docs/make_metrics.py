"""Writes docs/reference/metrics.md from the table of figures.

    python docs/make_metrics.py docs/reference/metrics.md

A test compares the committed file with the output.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tailrace.record.figures import FIGURES, TRIAL_FIGURES, Figure

INTRODUCTION = """\
# Metrics

`metrics.jsonl` has one object an optimizer step and one an evaluation. The figures of a round are in the
object of its last step. A key that ends with `/` stands for all keys that begin so. A figure that is not
known is left out; one that is not finite is null. Staleness counts publications of weights between the
generation of a token and its training; lag counts optimizer steps.

*Over rows* says what a figure comes to over several rows. `summary.json` has it for the whole run under
`ages`, and medians over the rounds under `round`. A trial is one run of a schedule in
`tailrace compare --json` (its `laps`) and in the planner.
"""
GROUPS = {
    "row": "Every row",
    "step": "An optimizer step",
    "evaluation": "An evaluation",
    "count": "Counted since the last row",
    "round": "A round",
}
LENGTHS = "round/completions/"
HEADER = "| key | unit | meaning | over rows | also |\n|---|---|---|---|---|"
LAP_HEADER = """\
## A trial

Beside the keys `trial.` of the tables above.

| key | unit | of | over rows | meaning |
|---|---|---|---|---|"""


def metrics_reference() -> str:
    """Return the page as Markdown."""
    parts = [INTRODUCTION.strip(), *map(_group, GROUPS), "\n".join([LAP_HEADER, *_laps()])]
    return "\n\n".join(parts) + "\n"


def _group(name: str) -> str:
    rows = [
        _line(f"`{each.name}`", each.unit, each.meaning, _total(each), _elsewhere(each))
        for each in FIGURES
        if each.group == name and not each.name.startswith(LENGTHS)
    ]
    if name == "round":
        rows.append(_line(f"`{LENGTHS}`", "tokens", "As `completions/` of a step, lengths only.", "", ""))
    return "\n".join([f"## {GROUPS[name]}", "", HEADER, *rows])


def _laps() -> Iterator[str]:
    for key, each in TRIAL_FIGURES.items():
        if each in FIGURES:
            continue
        of = f"`{each.name}`" if each.name else ""
        yield _line(f"`{key}`", each.unit, of, _total(each), each.meaning)


def _elsewhere(each: Figure) -> str:
    return ", ".join(f"`{section}.{key}`" for section, key in each.kept.items())


def _total(each: Figure) -> str:
    return each.total.__name__.replace("_", " ") if each.total else ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Iterable[str]) -> None:
    """Write the page to each path given."""
    for path in arguments:
        Path(path).write_text(metrics_reference(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
