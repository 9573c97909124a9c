"""`python -m reproductions`: what it refuses, and what it prints."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from reproductions.__main__ import PAPERS, main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slime"], f"NAME = 'slime': it is not a paper of tailrace; choose from {PAPERS[0]}"),
        (["pipelinerl", "--table", "9z"], "--table = '9z': pipelinerl has no such table here"),
        (["april", "--seeds", "0"], "--seeds = 0: a figure needs one; choose 1 or more"),
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
    written = json.loads(path.read_text())
    speedup = next(figure for figure in written["tables"]["Appendix A.4"] if figure["unit"] == "x")
    assert (speedup["printed"], speedup["kind"], speedup["holds"]) == (1.57, "determined", True)
    assert written["counts"]["parameters"] == {"printed": 10, "fitted": 4, "assumed": 6}
    assert written["counts"]["figures"]["fitted"] == 6 and written["counts"]["figures"]["predicted"] == 0
    assert (written["num_fitted"], written["seeds"], len(written["parameters"])) == (4, 1, 7)
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if "largest speed-up" in line)
    assert "1.57 x" in line and "determined" in line and "holds" in line
    said = " ".join(printed.split())
    assert "Of the parameters, 10 are printed, 4 fitted and 6 assumed." in said
    assert (
        "Of the 11 printed figures, 0 are predicted (0 of these are ranges), 5 determined by others" in said
    )
    assert "Fitted to r_train = 26.02: tau." in said and "Not attempted: Figs. 5a, 5b," in said


@pytest.mark.parametrize("name", [name for name in PAPERS if name != "staleness"])  # it has no set-up to fit
def test_a_paper_says_what_is_printed_fitted_and_assumed_and_what_is_not_attempted(name: str) -> None:
    paper = import_module(f"reproductions.{name}").PAPER
    assert paper.num_parameters["printed"] and paper.num_parameters["assumed"]
    assert sum(paper.num_parameters.values()) > len(paper.parameters)
    assert all(each.source or each.kind == "assumed" for each in paper.parameters)
    assert paper.not_attempted and (paper.contradictions or not paper.num_fitted)
