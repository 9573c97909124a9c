"""RolloutPipe's set-up: its bars at R = 32, and the command with one table."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from reproductions import rolloutpipe
from reproductions.__main__ import main
from reproductions.rolloutpipe import CGP_SHARE, NUM_FITTED, PAPER, REDUCTION, SYSTEMS, run


@pytest.fixture(autouse=True)
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rolloutpipe, "ROUNDS", 2)
    run.cache_clear()
    yield
    run.cache_clear()


@pytest.mark.parametrize("task", ["LSAT-AR", "OlyPhys"])
def test_reduction_and_cgp_s_share_at_32_groups_are_within_their_bars(task: str) -> None:
    slime_s, cgp_s, both_s = (run(task, 32, system).lap["main_time_s"] for system in SYSTEMS)
    low, high = REDUCTION[32]
    assert low - 3 <= 100 * (1 - both_s / slime_s) <= high + 3
    low, high = CGP_SHARE[32]
    assert low - 6 <= 100 * (slime_s - cgp_s) / (slime_s - both_s) <= high + 6


def test_the_printed_frontier_of_two_groups_is_slower_than_serial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    assert main(["rolloutpipe", "--table", "5.1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert (written["paper"], written["num_fitted"]) == ("rolloutpipe", NUM_FITTED)
    assert written["contradictions"] == list(PAPER.contradictions) != []
    (figures,) = written["tables"].values()
    main_time, reduction, first_dispatch = figures
    assert main_time["printed"] == 642.0 and main_time["kind"] == "predicted"
    assert reduction["ours"] < 0
    assert first_dispatch["ours"] < 52
    printed = capsys.readouterr().out
    assert "Section 5.1" in printed and "Fig. 4" not in printed
    assert f"{NUM_FITTED} parameters were fitted" in printed
