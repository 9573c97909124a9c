"""RollPacker's set-up: the command with one table, and the bars of two models in one period of rounds."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from reproductions import rollpacker
from reproductions.__main__ import main
from reproductions.rollpacker import (
    ABLATION,
    PAPER,
    PARTS,
    SCALED,
    fetching,
    table_1,
    table_2,
    triggered,
)
from reproductions.rollpacker_judge import interference
from reproductions.rollpacker_rewards import ASYNCHRONOUS, SOLVED, seconds_in_turn
from reproductions.rollpacker_runs import (
    LARGE,
    PERIOD,
    REWARDS,
    ROUND_S,
    SMALL,
    TAIL_BATCHING,
    VERL,
    Programs,
    growing_rollouts,
    long_rounds,
    run,
    set_up,
    short_rounds,
    speed,
)
from tailrace.extras.judges.memory import LayerBudget
from tailrace.extras.judges.simulated import ForwardPass, forward_pass
from tailrace.sim.settings import SimEngineSettings


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
    assert long["round/completions/mean_length"] > 4 * max(
        row["round/completions/mean_length"] for row in short_rounds(packed)
    )
    assert [row["round"] for row in short_rounds(packed)] == [0, 1, 2, 3]


def test_the_planner_shortens_the_rollouts_of_a_growing_limit() -> None:
    limits = (24_576, 28_672, 32_768)
    assert growing_rollouts(limits, 4).seconds < growing_rollouts(limits, 1).seconds


def test_at_the_longest_response_half_of_the_judges_layers_are_copied() -> None:
    budget = forward_pass(LARGE.sim("mps")).budget
    assert budget.resident_layers(32_768 + 200) == 14 == budget.num_layers // 2
    assert budget.resident_layers(1024) == 28


@pytest.mark.parametrize(("resident", "num_copied"), [(2, 3), (0, 5), (3, 0)])
def test_layers_that_are_copied_when_they_are_called_add_all_their_copies(
    resident: int, num_copied: int
) -> None:
    """Five layers that compute a token in 1 s and are copied in 3 s."""
    budget = LayerBudget(
        total_bytes=10 * (resident + 2) + 2, num_layers=5, layer_bytes=10, outside_bytes=0, token_bytes=1
    )
    forward = ForwardPass(budget, max_tokens=2, token_s=1.0, pair_s=0.0, read_s=0.0, copy_s=3.0)
    assert seconds_in_turn(forward, 2) == 5 * 2 + num_copied * 3


def test_time_slices_halve_both_and_mps_divides_the_arithmetic_units() -> None:
    """10 requests of 0.1 s in a step of 4 s need a quarter of the units, 30 of them half of 6 s."""
    engine = SimEngineSettings(base_s=3.0, compute_s=0.1, slope_s=0.1)
    halved = interference("time slices", engine, 10, 100)
    assert (halved.judge_slowdown, halved.judged_slowdown) == (2.0, 2.0)
    few, many = (interference("mps", engine, num, 100) for num in (10, 30))
    assert (few.judge_slowdown, few.judged_slowdown) == (1.0, 1 / (1 - 0.25))
    assert (many.judge_slowdown, many.judged_slowdown) == (1.0, 2.0)


def test_one_fetch_trains_all_groups_and_takes_longer_than_streaming_the_longer_the_less_it_fetches() -> None:
    small = replace(SMALL, groups=16)
    fetches = [replace(SCALED, schedule=fetching(share)) for share in (0.5, 0.2)]
    runs = [run(small, variant, ("Math",), PERIOD) for variant in (SCALED, *fetches)]
    assert [[row["round/num_groups"] for row in each.rounds] for each in runs] == [[16] * PERIOD] * 3
    streamed, half, fifth = (long_rounds(each)[0]["round/time_s"] for each in runs)
    assert streamed < half < fifth


def test_devices_that_change_hands_later_train_all_groups_and_make_a_long_round_longer() -> None:
    small = replace(SMALL, groups=16)
    schedules = [SCALED.schedule, triggered(0.2), triggered(0.8)]
    slow = replace(SCALED, slower=4.0)
    runs = [run(small, replace(slow, schedule=schedule), ("Math",), PERIOD) for schedule in schedules]
    assert [[row["round/num_groups"] for row in each.rounds] for each in runs] == [[16] * PERIOD] * 3
    adaptive, early, late = (long_rounds(each)[0]["round/time_s"] for each in runs)
    assert max(adaptive, early) < late


def test_reference_times_cut_short_rounds_and_learnt_ones_only_where_prompts_have_correct_responses() -> None:
    learnt = Programs(referenced=False)
    fixed, referenced, assumed, solved = (
        [row["round/wait_s"] for row in run(SMALL, variant, ("Code",), 2).rounds[:2]]
        for variant in (
            ASYNCHRONOUS,
            REWARDS,
            replace(REWARDS, programs=learnt),
            replace(REWARDS, programs=replace(SOLVED, referenced=False)),
        )
    )
    assert min(fixed) > 30 and min(assumed) > 30
    assert max(referenced) < 15
    assert max(solved) < 20


def test_a_variant_changes_the_devices_the_training_and_the_judge_of_its_set_up() -> None:
    reserved, whole = (set_up(SMALL, replace(TAIL_BATCHING, reserved=each)) for each in (True, False))
    assert reserved.cluster and whole.cluster
    assert (reserved.cluster.devices, whole.cluster.devices) == (12, 16)
    slower = set_up(SMALL, replace(TAIL_BATCHING, slower=2.0))
    assert slower.cluster and slower.cluster.training_efficiency == whole.cluster.training_efficiency / 2
    assert forward_pass(set_up(SMALL, REWARDS)).budget.resident_layers(SMALL.max_tokens + 200) == 14


def test_each_part_has_a_bar_of_its_own_and_the_unexplained_seconds_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = replace(SMALL, groups=8)
    monkeypatch.setattr(rollpacker, "ABLATION", {few: ABLATION[SMALL]})
    rows = {figure.what: figure for figure in table_2(0).figures}
    cumulative = [rows[part].ours for part in PARTS]
    own = [figure for what, figure in rows.items() if what.endswith("its own factor")]
    assert [figure.ours for figure in own] == [b / a for a, b in pairwise(cumulative)]
    assert [round(figure.printed, 2) for figure in own] == [1.55, 1.0, 1.01]
    assert all(figure.tolerance == 0.15 * figure.printed for figure in own)
    before, after = run(few, VERL), run(few, PARTS["+ trainer"])
    free = [(each.seconds - ROUND_S * len(each.rounds)) / each.seconds for each in (before, after)]
    ours = rows[f"all parts, without the {ROUND_S:g} s"].ours
    assert ours == pytest.approx(cumulative[-1] * free[0] / free[1]) and ours > cumulative[-1]
    monkeypatch.setattr(rollpacker, "TASKS", ("Math",))
    monkeypatch.setattr(rollpacker, "FIRST", 1)
    shares = {figure.what: figure for figure in table_1(0).figures}
    assert sum(figure.ours for figure in shares.values()) == pytest.approx(100)
    assert shares["unexplained"].printed is None and shares["unexplained"].ours > 5


def test_the_command_writes_kinds_and_contradictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollpacker, "TASKS", ("Code",))
    monkeypatch.setattr(rollpacker, "FIRST", 1)
    path = tmp_path / "figures.json"
    assert main(["rollpacker", "--table", "Table 1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["contradictions"] == list(PAPER.contradictions) != []
    kinds = [(figure["what"], figure["kind"]) for figure in written["tables"]["Table 1"]]
    assert kinds == [
        ("rollout", "predicted"),
        ("reward", "predicted"),
        ("training", "fitted"),
        ("unexplained", "fitted"),
    ]
    assert PAPER.num_fitted == 7


def test_its_tables_are_those_of_the_paper() -> None:
    assert list(PAPER.tables) == [
        "Table 1",
        "Table 2",
        "Table 3",
        "Table 4",
        "Fig. 6",
        "Fig. 9",
        "Fig. 11",
        "Fig. 12a",
        "Fig. 12b",
        "Fig. 13a",
        "Fig. 13b",
        "Fig. 13c",
        "Fig. 14",
        "Section 6.5",
    ]
