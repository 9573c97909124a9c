"""docs/reference/configuration.md and simulation.md: every key of the config and of the schedules."""

import inspect
import re
from pathlib import Path

import pytest

from make_configuration import config_reference, main
from tailrace.schedules import SCHEDULES

PAGES = Path(__file__).parents[2] / "docs" / "reference"
REFERENCE = "\n".join(config_reference())


@pytest.mark.parametrize("page", ["configuration.md", "simulation.md"])
def test_the_committed_page_is_the_generated_one(tmp_path: Path, page: str) -> None:
    main([str(tmp_path)])
    assert (PAGES / page).read_text() == (tmp_path / page).read_text(), "run: make docs"


def test_the_sections_of_virtual_time_have_a_page_of_their_own() -> None:
    run, time = config_reference()
    assert "## [sim.engines]" in time
    assert "[sim" not in re.sub(r"^[^#].*$", "", run, flags=re.MULTILINE)
    assert "## [run]" not in time


@pytest.mark.parametrize(
    "row",
    [
        '|`max_prompt_tokens`|none|integer ≥1|A longer prompt is dropped with the reason "prompt too long".|',
        '|`kind`|`"sqlite"`|`sqlite`, `memory`|`sqlite`: the file ',
        "|`flush_s`|`0.2`|number >0 ≤3600|Seconds between two commits.|",
        "|`config`|none|string|Config of a data set that has several.|",
        "|`checkpoint_every`|`0`|integer ≥0|Rounds between checkpoints. 0: only at the end of the run, ",
        '|`target_modules`|`"all-linear"`|`all-linear`, list of strings|',
        "|`groups_per_round`|integer ≥1|Groups of a rollout (R).|",
    ],
)
def test_a_row_has_default_values_and_meaning(row: str) -> None:
    assert f"\n{row}" in REFERENCE


def test_what_several_kinds_share_is_said_once() -> None:
    lines = REFERENCE.splitlines()
    assert sum(line.startswith("|`max_prompt_tokens`") for line in lines) == 1
    assert (
        sum(line.startswith("|`min_s`") for line in lines) == 1
    )  # [reward.code.timeout], [sim.rewards.code.timeout]
    assert any(line.startswith("|`urls`|") and "|(vllm, sglang) " in line for line in lines)


def test_each_section_has_a_heading_and_each_schedule_a_row() -> None:
    lines = REFERENCE.splitlines()
    headings = {line for line in lines if line.startswith("#")}
    assert {
        "## [run]",
        "## [schedule]",
        "## [data]",
        '### [data], `kind = "rows"`',
        "### [data.lengths.NAME]",
        "## [sim.engines]",
        "### [schedule.admission]",
    } <= headings
    assert len(headings) == sum(line.startswith("#") for line in lines)
    for name, schedule in SCHEDULES.items():
        (row,) = [line for line in lines if line.startswith(f"|`{name}`|`")]
        _, *parameters = inspect.signature(schedule).parameters
        assert re.findall(r"`(\w+)(?: = .*?)?`", row) == [name, *parameters]
