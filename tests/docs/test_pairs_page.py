"""docs/reference/pairs.md has every pair of benchmarks/results/advise_pairs.json, the worst first."""

import json
from pathlib import Path
from statistics import median

from make_pairs import DATA, pairs
from tailrace.extras.plan.advise import PAIRS_ERROR

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "pairs.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == pairs(json.loads(DATA.read_text())), "run `make docs`"


def test_an_error_is_that_of_the_predicted_step_and_no_pair_without_one_lacks_the_reason() -> None:
    rows = json.loads(DATA.read_text())
    for row in rows:
        assert ("error" in row) != ("why_not" in row)
        if "error" in row:
            assert row["error"] == round(row["predicted_s"] / row["printed_s"] - 1, 4)


def test_advise_says_the_median_error_of_these_pairs_and_that_all_are_too_slow() -> None:
    errors = [row["error"] for row in json.loads(DATA.read_text()) if "error" in row]
    assert round(median(errors), 2) == PAIRS_ERROR
    assert min(errors) > 0


def test_the_worst_pair_stands_first_and_is_named_with_the_median() -> None:
    base = {"source": "s", "devices": "1 + 1", "synchronous_s": 9.0, "printed_s": 4.0, "predicted_s": 5.0}
    rows = [base | {"pair": name, "error": error} for name, error in (("a", 0.1), ("b", -0.3), ("c", 0.2))]
    page = pairs([*rows, {"pair": "d", "source": "t", "printed_s": 2.0, "why_not": "no mode"}])
    assert [line[2] for line in page.splitlines() if line.startswith("| ") and "%" in line] == ["b", "c", "a"]
    assert "Median error: 20% of 3. The worst: b, -30%.\n" in page
    assert "| d | 2.0 s | no mode |\n\nSources: s; t.\n" in page
