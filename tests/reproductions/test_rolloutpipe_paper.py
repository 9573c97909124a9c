"""RolloutPipe's set-up: its bars at R = 32, and the command with one table."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

import pytest

from reproductions import rolloutpipe, rolloutpipe_width
from reproductions.__main__ import main
from reproductions.rolloutpipe import CGP_SHARE, PAPER, REDUCTION, SYSTEMS, main_times, run, waiting
from tailrace.rollout.admission import Frontier


@pytest.fixture(autouse=True)
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rolloutpipe, "ROUNDS", 2)
    run.cache_clear()
    yield
    run.cache_clear()


@pytest.mark.parametrize("task", ["LSAT-AR", "OlyPhys"])
def test_reduction_and_cgp_s_share_at_32_groups_are_within_their_bars(task: str) -> None:
    slime_s, cgp_s, both_s = (run(task, 32, system).figures["main_time_s"] for system in SYSTEMS)
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
    assert (written["paper"], written["num_fitted"]) == ("rolloutpipe", 12)
    assert written["contradictions"] == list(PAPER.contradictions) != []
    (figures,) = written["tables"].values()
    rows = {(figure["row"], figure["what"]): figure for figure in figures}
    main_time, first_dispatch = rows["F_w = 2", "main time"], rows["F_w = 2", "first dispatch"]
    assert main_time["printed"] == 642.0 and main_time["kind"] == "predicted"
    assert main_time["ours"] > 1.5 * rows["CGP+FGD", "main time"]["ours"]
    assert first_dispatch["ours"] < 52
    printed = capsys.readouterr().out
    assert "Section 5.1: " in printed and "Fig. 4: " not in printed
    assert "10 are printed, 12 fitted and 2 assumed" in printed


def test_frontier_first_has_the_times_of_a_plain_cap_and_the_row_of_fgd_is_the_strict_frontier() -> None:
    found = [run("Sci-XW", 32, system).figures for system in ("frontier first", "at most 72", "CGP+FGD")]
    assert found[0] == found[1] != found[2]
    assert rolloutpipe.ADMISSIONS["CGP+FGD"] == Frontier(groups=9)


def test_the_waiting_ratio_of_the_table_is_the_metric_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolloutpipe, "SIZES", (32,))
    monkeypatch.setattr(rolloutpipe, "MEDIANS", {"LSAT-AR": rolloutpipe.MEDIANS["LSAT-AR"]})
    rows = {figure.what: figure for figure in waiting(0).figures}
    rounds = run("LSAT-AR", 32, "CGP").rounds
    assert rows["waiting ratio, CGP"].ours == 100 * fmean(row["round/waiting_ratio"] for row in rounds)
    assert rows["with 37 s a round, CGP"].ours > rows["waiting ratio, CGP"].ours


def test_a_main_time_has_the_sample_deviation_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolloutpipe, "SIZES", (32,))
    monkeypatch.setattr(rolloutpipe, "MEDIANS", {"LSAT-AR": rolloutpipe.MEDIANS["LSAT-AR"]})
    rows = {figure.what: figure for figure in main_times(0).figures}
    first, second = (row["round/main_time_s"] for row in run("LSAT-AR", 32, "CGP").rounds)
    assert rows["main time, CGP"].deviation == pytest.approx(stdev([first, second]))
    assert rows["main time, CGP"].deviation == pytest.approx(abs(first - second) / 2**0.5)
    assert rows["reduction against Slime"].deviation is None


def test_the_printed_width_lengthens_a_round_and_the_one_from_rates_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rolloutpipe_width, "LOADS", (1.5,))
    sims = rolloutpipe_width.set_ups()
    kept = {row: sims[row] for row in (next(iter(sims)), list(sims)[-1])}
    monkeypatch.setattr(rolloutpipe_width, "set_ups", lambda: kept)
    devices, growing = (
        {
            figure.what: figure.ours
            for figure in rolloutpipe_width.widths(0).figures
            if figure.row.startswith(row)
        }
        for row in kept
    )
    assert devices["F_w = U, more main time"] > 10 and growing["F_w = U, more main time"] > 10
    assert (devices["F_w from rates"], devices["F_w from rates, more main time"]) == (48, 0.0)
    assert growing["F_w from rates"] < 16 and growing["F_w from rates, more main time"] < -5
