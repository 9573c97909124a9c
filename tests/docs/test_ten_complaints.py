"""docs/how-to/ten-complaints.md: each command prints what stands under it."""

from pathlib import Path

import pytest

from helpers.page_runs import DOCS, blocks
from tailrace.cli import main

PAGE = "how-to/ten-complaints.md"
SHOWN = [block.text for block in blocks(PAGE) if block.language == "console"]


def joined(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.split()[2])
def test_a_command_prints_what_the_page_shows(
    shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(DOCS.parent / name)
    monkeypatch.chdir(tmp_path)
    command, *lines = shown.strip().splitlines()
    main(command.removeprefix("$ tailrace ").split())
    told = capsys.readouterr()
    printed = joined(told.out + told.err)
    assert lines and [line for line in lines if joined(line) not in printed] == []


def test_the_page_has_ten_complaints_each_with_threads_and_a_command() -> None:
    parts = (DOCS / PAGE).read_text().split("\n## ")[1:]
    assert len(parts) == len(SHOWN) == 10
    assert all("https://github.com/" in part and "\n```console\n$ tailrace " in part for part in parts)
