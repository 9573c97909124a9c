"""Writes docs/reference/pairs.md: what `tailrace advise` says of runs that other projects printed in pairs.

    python benchmarks/advise_pairs.py --json benchmarks/results/advise_pairs.json
    python docs/make_pairs.py docs/reference/pairs.md

A test compares the committed page with the output.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

DATA = Path(__file__).parents[1] / "benchmarks" / "results" / "advise_pairs.json"
INTRODUCTION = """\
# What advise says of published pairs

`python benchmarks/advise_pairs.py --json benchmarks/results/advise_pairs.json`

A pair is a synchronous run and an asynchronous one that a project printed side by side. `tailrace advise`
reads the synchronous half alone: seconds of a step and of its parts, samples, devices. Lengths have one law
for all pairs, because no page prints any. What it predicts for the framework's mode on the printed division
of the devices stands beside the asynchronous half, the worst first. Nothing is fitted to that half.
"""


def pairs(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page as Markdown. `rows`: as benchmarks/advise_pairs.py writes them."""
    answered = sorted((row for row in rows if "error" in row), key=lambda row: -abs(row["error"]))
    lines = ["| pair | devices | synchronous step | printed | predicted | error |", "|---" * 6 + "|"]
    for row in answered:
        seconds = [f"{row[key]:.1f} s" for key in ("synchronous_s", "printed_s", "predicted_s")]
        lines.append(f"| {row['pair']} | {row['devices']} | {' | '.join(seconds)} | {row['error']:+.0%} |")
    middle = median(abs(row["error"]) for row in answered)
    worst = answered[0]
    verdict = (
        f"Median error: {middle:.0%} of {len(answered)}. The worst: {worst['pair']}, {worst['error']:+.0%}."
    )
    left = ["| pair | printed | no answer because |", "|---" * 3 + "|"]
    left += [
        f"| {row['pair']} | {row['printed_s']:.1f} s | {row['why_not']} |" for row in rows if "why_not" in row
    ]
    sources = sorted({row["source"] for row in rows})
    found = f"Sources: {'; '.join(sources)}."
    return "\n".join([INTRODUCTION, *lines, "", verdict, "", "## Not answered", "", *left, "", found, ""])


def main(arguments: Iterable[str]) -> None:
    """Write the page to each path given."""
    for path in arguments:
        Path(path).write_text(pairs(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
