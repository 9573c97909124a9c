"""docs/start/your-own-run.md: its files are written, its commands and scripts run, as they are printed."""

import json
import re
from pathlib import Path

import pytest

from helpers.page_runs import DOCS, blocks, commands, run, write_files

PAGE = "start/your-own-run.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page beside the model."""
    folder = tmp_path_factory.mktemp("your_own_run")
    write_files(PAGE, folder)
    return folder


def test_the_commands_of_the_page_run_in_their_order(folder: Path) -> None:
    assert commands(PAGE)[1] == "train run.toml --output-dir runs/first"
    for command in commands(PAGE):
        run(folder, "-m", "tailrace.cli", *command.split())
    rows = (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row)["step"] for row in rows) == 2


def test_the_output_folder_has_what_the_docs_list(folder: Path) -> None:
    _, _, after = (DOCS / "how-to" / "read-a-run.md").read_text().partition("| file | content |")
    listed = re.findall(r"^\| `([\w.]+)/?", after.split("\n\n")[0], flags=re.MULTILINE)
    assert "ledger.sqlite" in listed
    first = folder / "runs" / "first"
    assert [name for name in listed if not (first / name).exists()] == []


def test_the_trained_model_is_used_in_transformers(folder: Path) -> None:
    (script,) = (block for block in blocks("start/questions.md") if block.title)
    (folder / script.title).write_text(script.text)
    assert "What is 12 + 30?" in run(folder, script.title)


@pytest.mark.parametrize("script", [block.title for block in blocks(PAGE) if block.title.endswith("run.py")])
def test_a_run_from_python(folder: Path, script: str) -> None:
    assert run(folder, script).splitlines()[-1] == "2"
