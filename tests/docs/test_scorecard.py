"""docs/reference/scorecard.md has every printed figure of the papers, and the rows of docs/scorecard.toml."""

import json
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest

from make_scorecard import DATA, RESULTS, error, read_data, scorecard
from reproductions.__main__ import PAPERS

PRINTED = [name for name in PAPERS if name != "staleness"]  # it has closed forms, and no printed figures


def test_the_page_is_up_to_date() -> None:
    assert (DATA.parent / "reference" / "scorecard.md").read_text() == scorecard(read_data()), (
        "run `make docs`"
    )


@pytest.mark.parametrize("name", PRINTED)
def test_each_printed_figure_of_a_paper_has_a_row_with_its_kind(name: str) -> None:
    written = json.loads(max(RESULTS.glob(f"*/{name}.json")).read_text())
    assert list(written["tables"]) == list(import_module(f"reproductions.{name}").PAPER.tables)
    printed = [each for table in written["tables"].values() for each in table if each["printed"] is not None]
    (part,) = (part for part in read_data()["part"] if part["title"] == name)
    assert sorted(row["kind"] for row in part["row"]) == sorted(figure["kind"] for figure in printed)


def test_the_predicted_rows_of_a_part_stand_first_and_the_worst_of_them_at_the_top() -> None:
    rows = [{"what": what, "measured": 10, "1.0": ours} for what, ours in (("a", 11), ("b", 4), ("c", 13))]
    rows.append({"what": "d", "measured": 10, "1.0": 30, "kind": "fitted"})
    page = scorecard({"releases": ["1.0"], "part": [{"title": "Live", "command": "run", "row": rows}]})
    assert [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| ")][1:5] == list("bcad")
    assert page.endswith("|  | median error, predicted |  | 30.0% of 3 |\n")


def test_a_row_that_changes_its_class_is_listed_with_the_reason_and_its_first_class_keeps_a_median() -> None:
    kinds = [{"1.0": "predicted", "1.1": "fitted"}, {"1.0": "predicted", "1.1": "predicted"}]
    rows = [
        {"what": what, "measured": 10, "1.0": 15, "1.1": 11, "kind": its["1.1"], "kinds": its}
        for what, its in zip(("a", "b"), kinds, strict=True)
    ]
    data = {"releases": ["1.0", "1.1"], "part": [{"title": "Live", "command": "run", "row": rows}]}
    page = scorecard(data | {"reclassified": [{"rows": "^a$", "why": "a cost is fitted to it"}]})
    assert "|  | median error, predicted |  | 50.0% of 1 | 10.0% of 1 |" in page
    assert "|  | the rows that 1.0 predicts |  | 50.0% of 2 | 10.0% of 2 |" in page
    assert page.endswith("| Live | a | predicted to fitted | a cost is fitted to it |\n")
    with pytest.raises(LookupError, match="Live, a: no reason for its class fitted"):
        scorecard(data)


def test_no_row_of_the_page_is_above_a_worse_one_of_its_kind() -> None:
    def off(line: str) -> float:
        found = line.rsplit(": ", 1)[-1].split("%")[0]
        return abs(int(found)) if found.lstrip("+-").isdigit() else 0

    rows = [line for line in scorecard(read_data()).splitlines() if line.startswith("| ")]
    kinds = [line.split(" | ")[0] for line in rows]
    pairs = [pair for pair, kind in zip(pairwise(rows), pairwise(kinds), strict=True) if len({*kind}) == 1]
    assert len(pairs) > 250
    assert [pair for pair in pairs if off(pair[0]) < off(pair[1])] == []


@pytest.mark.parametrize(
    ("measured", "predicted", "expected"),
    [
        (200, 230, 15.0),
        (200, [150, 160], -22.5),
        ([10, 20], 30, 100.0),
        ([10, 20], [10, 26], 20.0),
        (10, 10, 0.0),
    ],
)
def test_an_error_compares_the_middles_of_ranges(
    measured: object, predicted: object, expected: float
) -> None:
    assert error({"measured": measured, "1.0": predicted}, "1.0") == pytest.approx(expected)


@pytest.mark.parametrize("row", [{"measured": 0.0, "1.0": 3}, {"measured": 2.0}])
def test_there_is_no_error_of_what_was_not_measured_or_not_predicted(row: dict[str, Any]) -> None:
    assert error(row, "1.0") is None


def test_a_release_is_a_column_and_may_leave_rows_out() -> None:
    rows = [
        {"what": "a", "measured": 100, "unit": " s", "1.0": 110, "1.1": 104},
        {"what": "b", "measured": [20, 40], "unit": "%", "kind": "determined", "1.0": 33},
        {"what": "c", "1.0": -30},
    ]
    page = scorecard(
        {"releases": ["1.0", "1.1"], "part": [{"title": "Live", "command": "run it", "row": rows}]}
    )
    assert "\n## Live\n\n`run it`\n\n|  |  | measured | 1.0 | 1.1 |\n|---|---|---|---|---|\n" in page
    assert "\n| predicted | c |  | -30% |  |\n| predicted | a | 100 s | 110 s: +10% | 104 s: +4% |\n" in page
    assert "\n| determined | b | 20 to 40% | 33%: +10%, inside |  |\n" in page
    assert page.endswith("\n|  | median error, predicted |  | 20.0% of 2 | 4.0% of 1 |\n")
