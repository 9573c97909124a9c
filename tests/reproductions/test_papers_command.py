"""`python -m reproductions`: what it refuses, and what it prints."""

import json
from pathlib import Path

import pytest

from reproductions.__main__ import PAPERS, main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slime"], f"NAME = 'slime': it is not a paper of tailrace; choose from {PAPERS[0]}"),
        (["pipelinerl", "--table", "9z"], "--table = '9z': pipelinerl has no such table here"),
        (["april", "--json", "/none/f.json"], "--json = '/none/f.json': there is no folder /none"),
    ],
)
def test_words_that_do_not_go_with_a_paper_end_with_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_table_shows_each_printed_figure_beside_ours_with_its_kind_and_its_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "figures.json"
    assert main(["pipelinerl", "--table", "Appendix A.4", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["tables"]["Appendix A.4"]
    speedup = next(figure for figure in figures if figure["unit"] == "x")
    assert (speedup["printed"], speedup["kind"], speedup["holds"]) == (1.57, "derived", True)
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if "largest speed-up" in line)
    assert "1.57 x" in line and "derived" in line and "holds" in line
    assert "Of the printed figures, 0 are predicted, 8 derived and 3 fitted." in printed
