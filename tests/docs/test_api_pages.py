"""docs/reference/commands.md and python.md: the commands and the public names, as their docstrings say."""

import re
from pathlib import Path

import pytest

import tailrace
from make_api import commands, main, python
from tailrace.cli import COMMANDS

PAGES = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("page", ["commands.md", "python.md"])
def test_the_committed_page_is_the_generated_one(tmp_path: Path, page: str) -> None:
    main([str(tmp_path)])
    assert (PAGES / page).read_text() == (tmp_path / page).read_text(), "run: make docs"


def test_each_command_and_each_public_name_has_a_heading() -> None:
    assert re.findall(r"^## (.+)$", commands(), re.MULTILINE) == [*COMMANDS]
    assert {*re.findall(r"^## (.+)$", python(), re.MULTILINE)} == {*tailrace.__all__}


def test_the_arguments_of_a_function_are_a_list_and_an_example_is_code() -> None:
    page = python()
    assert "- overrides: values by dotted key" in page
    assert '    >>> print(ConfigError("run.rounds"' in page
