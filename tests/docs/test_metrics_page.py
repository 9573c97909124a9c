"""docs/reference/metrics.md has the table of figures."""

from pathlib import Path

from make_metrics import metrics_reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == metrics_reference(), "run `make docs`"


def test_a_figure_has_its_unit_its_total_and_its_other_keys() -> None:
    row = "| `staleness/max` | publications | The largest of a token. | largest | `ages.staleness_max`, "
    assert f"\n{row}`trial.staleness_max` |" in metrics_reference()
