"""RollPacker's set-up: the command with one table, and the bars of two models in one period of rounds."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.papers import rollpacker
from tailrace.papers.rollpacker import ABLATION, PAPER, PARTS, long_rounds, short_rounds
from tailrace.papers.rollpacker_runs import LARGE, PERIOD, REWARDS, VERL, growing_rollouts, run, speed


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    run.cache_clear()
    yield
    run.cache_clear()


def test_tail_batching_and_rewards_are_within_the_bar_and_the_fifth_round_is_long() -> None:
    packed = run(LARGE, REWARDS, rounds=PERIOD)
    ours = speed(packed) / speed(run(LARGE, VERL, rounds=2))
    printed = ABLATION[LARGE][list(PARTS.values()).index(REWARDS)]
    assert abs(ours / printed - 1) <= 0.15
    (long,) = long_rounds(packed)
    assert long.lengths.mean > 4 * max(row.lengths.mean for row in short_rounds(packed))
    assert [row.round for row in short_rounds(packed)] == [0, 1, 2, 3]


def test_the_planner_shortens_the_rollouts_of_a_growing_limit() -> None:
    limits = (24_576, 28_672, 32_768)
    assert growing_rollouts(limits, 4).seconds < growing_rollouts(limits, 1).seconds


def test_the_command_writes_kinds_and_contradictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollpacker, "TASKS", ("Code",))
    monkeypatch.setattr(rollpacker, "FIRST", 1)
    path = tmp_path / "figures.json"
    assert main(["simulate", "--paper", "rollpacker", "--table", "Table 1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["contradictions"] == list(PAPER.contradictions) != []
    kinds = [(figure["what"], figure["kind"]) for figure in written["tables"]["Table 1"]]
    assert kinds == [("rollout", "predicted"), ("reward", "predicted"), ("training", "fitted")]
    assert PAPER.num_fitted == 6


def test_its_tables_are_those_of_the_paper() -> None:
    assert list(PAPER.tables) == [
        "Table 1",
        "Table 2",
        "Table 3",
        "Fig. 9",
        "Fig. 11",
        "Fig. 12a",
        "Section 6.5",
    ]
