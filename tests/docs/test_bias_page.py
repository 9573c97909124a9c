"""docs/reference/bias.md: the table that a simulation of each schedule writes."""

from pathlib import Path

import pytest

from make_bias import bias_reference, line_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "bias.md"


@pytest.mark.parametrize("name", ["serial", "april", "tailbatch"])
def test_a_schedule_prefers_what_the_page_says(name: str) -> None:
    assert line_of(name) in PAGE.read_text().splitlines(), "run `make docs`"


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == bias_reference(), "run `make docs`"
