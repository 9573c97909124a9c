"""The commands of docs/how-to and of the first run, as they are printed, in the folder of "Your own run"."""

import json
from pathlib import Path

import pytest

from helpers.page_runs import DOCS, commands, run, run_commands, write_files

YOUR_OWN_RUN = "start/your-own-run.md"
PAGES = [
    "how-to/" + page.name
    for page in sorted((DOCS / "how-to").glob("*.md"))
    if commands(f"how-to/{page.name}")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("how_to")
    write_files(YOUR_OWN_RUN, folder)
    run(folder, "-m", "tailrace.cli", "train", "run.toml", "--output-dir", "runs/first")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_their_order(folder: Path, page: str) -> None:
    run_commands(page, folder)


@pytest.mark.slow
def test_the_commands_of_the_first_run_run_in_their_order(tmp_path: Path) -> None:
    first, *others = commands("start/first-run.md")
    assert first == "quickstart --output-dir runs/quickstart"
    run(tmp_path, "-m", "tailrace.cli", *first.split(), "--run.rounds", "2")
    for command in others:
        run(tmp_path, "-m", "tailrace.cli", *command.split())
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["rounds"] == 2
