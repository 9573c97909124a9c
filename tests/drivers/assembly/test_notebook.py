"""A run in a notebook: one table in place of a line a step."""

import re
from pathlib import Path

import pytest

from helpers.record_story import pipelined_round, play
from helpers.small_run import write_small_run
from tailrace.drivers.assembly.notebook import NotebookDisplay
from tailrace.record.base import RecordSettings

CELLS = (
    "import tailrace\nsummary = tailrace.train(tailrace.load_config('run.toml'), 'out')",
    "summary",
    "print(summary)",
)


def test_a_real_kernel_shows_one_table_of_the_steps_and_the_summary_as_one(tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"pip install {package}")
    import nbclient
    import nbformat

    write_small_run(tmp_path)
    book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, CELLS)))
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained, shown, printed = (cell.outputs for cell in book.cells)
    (table,) = (each.data["text/html"] for each in trained if each.output_type == "display_data")
    assert re.findall(r"<tr><td>(\d+)</td><td>(./3)</td>", table) == [
        (str(2 * round + step), f"{round + 1}/3") for round in range(3) for step in (1, 2)
    ]
    assert table.count("Sample | Reward") == 1 and "Evaluation | After round 3" in table
    assert not any(each.get("text", "").startswith("Step ") for each in trained), "no line a step"
    (summary,) = shown
    assert summary.data["text/html"].startswith("<table><tr><th>held-out reward</th><td>")
    assert len(printed[0].text) < 800 and printed[0].text.splitlines()[2] == "steps            6 in 3 rounds"


def test_the_table_has_the_figures_of_a_step_and_all_where_they_are_asked_for() -> None:
    for verbose, names in ((False, 10), (True, 16)):
        display = NotebookDisplay(1, lambda: "", RecordSettings(verbose=verbose))
        shown: list[str] = []
        display._show = lambda display=display, shown=shown: shown.append(display.html())  # type: ignore[method-assign]
        play(pipelined_round().events, display)
        assert shown[-1].count("<th>") == names
        assert "<tr><td>1</td><td>1/1</td><td>0.5000</td>" in shown[-1]
        assert "<div>Sample | Reward 1.0000 | Prompt &#x27;question 0&#x27;" in shown[-1]
