"""docs/scorecard.md has the predictions and measurements of docs/scorecard.toml."""

import tomllib

import pytest

from make_scorecard import DATA, error, scorecard


def test_the_page_is_up_to_date() -> None:
    page = DATA.with_suffix(".md").read_text()
    assert page == scorecard(tomllib.loads(DATA.read_text())), "run `make docs`"


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


def test_a_release_is_a_column_and_may_leave_rows_out() -> None:
    rows = [
        {"what": "a", "measured": 100, "unit": " s", "1.0": 110, "1.1": 104},
        {"what": "b", "1.0": -30},
    ]
    page = scorecard(
        {"releases": ["1.0", "1.1"], "part": [{"title": "Live", "command": "run it", "row": rows}]}
    )
    assert "\n## Live\n\n`run it`\n\n|  | measured | 1.0 | 1.1 |\n|---|---|---|---|\n" in page
    assert "\n| a | 100 s | 110 s: +10% | 104 s: +4% |\n| b |  | -30% |  |\n" in page
    assert page.endswith("\n| median error |  | 20.0% | 4.0% |\n")
