"""docs/configuration.md: every key of the config and of the schedules, as the code has them."""

from pathlib import Path

import pytest

from make_configuration import config_reference, main
from tailrace.schedules import SCHEDULES

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_the_generated_one(tmp_path: Path) -> None:
    main([str(tmp_path / "page.md")])
    assert PAGE.read_text() == (tmp_path / "page.md").read_text(), "run: make docs"


@pytest.mark.parametrize(
    "row",
    [
        "| `max_prompt_tokens` | integer | none | >= 1 | A longer prompt is dropped with the reason ",
        '| `kind` | string | `"sqlite"` | `sqlite`, `memory` | `sqlite`: the file ',
        "| `flush_s` | number | `0.2` | > 0, <= 3600 | Seconds between two commits.",
        "| `path` | path | required |  | A JSONL file, a parquet file, or a Hugging Face dataset folder. |",
        "| `groups_per_round` | integer | required | >= 1 | ",
        "| `prompt_speculation` | number | `1.25` | >= 1 | ",
    ],
)
def test_a_row_has_type_default_range_and_meaning(row: str) -> None:
    assert f"\n{row}" in config_reference()


def test_each_section_and_each_schedule_has_a_heading() -> None:
    lines = config_reference().splitlines()
    headings = {line for line in lines if line.startswith("#")}
    assert {f"### {name}" for name in SCHEDULES} <= headings
    assert {
        "## [run]",
        "## [schedule]",
        '## [data], `kind = "rows"`',
        '## [data], `kind = "reasoning_gym"`',
        "## [data.lengths.NAME]",
        "## [sim.engines]",
        '#### [schedule.admission], `kind = "frontier"`',
    } <= headings
    assert len(headings) == sum(line.startswith("#") for line in lines)
