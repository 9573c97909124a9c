"""The table of figures, the statistics that rows are made of."""

import math

import pytest

from tailrace.record.events import Row
from tailrace.record.figures import (
    FIGURES,
    TRIAL_FIGURES,
    counts_of,
    family,
    joined,
    length_figures,
    mean,
    ordered,
    over_tokens,
    over_wall_time,
    standard_deviation,
)


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1.0, 2.0, 6.0], 3.0),
        ([1e308] * 8, 1e308),
        ([1.7e308, -1.7e308], 0.0),
        ([math.inf, 1.0], math.nan),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
    ],
)
def test_a_mean_is_finite_or_nan(values: list[float], expected: float) -> None:
    assert mean(values) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1.0, 3.0], math.sqrt(2)),
        ([2.0], 0.0),
        ([1e308] * 8, 0.0),
        ([1e308, 0.0], 1e308 / math.sqrt(2)),
        ([1.7e308, -1.7e308], math.nan),
        ([math.inf, 0.0], math.nan),
    ],
)
def test_a_deviation_is_finite_or_nan(values: list[float], expected: float) -> None:
    assert standard_deviation(values) == pytest.approx(expected, nan_ok=True)


def test_percentiles_are_lengths_that_occurred() -> None:
    lengths = list(range(100, 0, -1))
    kinds = ("mean", "min", "p50", "p90", "p99", "max", "std")
    values = (50.5, 1, 50, 90, 99, 100, pytest.approx(math.sqrt(100 * 101 / 12)))
    assert list(length_figures("", lengths).items()) == [
        (f"{kind}_length", value) for kind, value in zip(kinds, values, strict=True)
    ]
    assert set(length_figures("", [7]).values()) == {7, 0.0}


def test_every_figure_stands_once_in_the_table_with_a_meaning() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    assert all(figure.meaning.endswith(".") for figure in (*FIGURES, *TRIAL_FIGURES.values()))


def test_a_row_has_the_order_of_the_table_and_families_keep_theirs() -> None:
    row: Row = {
        "round/reward": 1,
        "groups/trained": 2,
        "rewards/b": 3,
        "rewards/a": 4,
        "loss": 5,
        "reward": 6,
    }
    assert list(ordered(row)) == [
        "reward",
        "rewards/b",
        "rewards/a",
        "loss",
        "groups/trained",
        "round/reward",
    ]


def test_a_family_has_no_figure_of_another_one() -> None:
    row: Row = {
        "eval/reward": 0.5,
        "eval/gsm8k/pass@4": 0.25,
        "groups/filtered/old": 2,
        "groups/trained": 1,
    }
    assert family(row, "eval/") == {"gsm8k/pass@4": 0.25}
    assert family(row, "groups/filtered/") == {"old": 2}


def test_counts_of_a_step_and_of_its_rounds_end_are_added_and_figures_are_not() -> None:
    step: Row = {"step": 3, "loss": 0.5, "groups/trained": 1, "groups/dropped/old": 2}
    end: Row = {"round": 1, "round/time_s": 4.0, "groups/trained": 2, "engines/died/a": 1}
    assert counts_of([step, end]) == {"groups/trained": 3, "groups/dropped/old": 2, "engines/died/a": 1}
    assert list(joined(step, end).items()) == [
        ("step", 3),
        ("round", 1),
        ("loss", 0.5),
        ("groups/trained", 3),
        ("groups/dropped/old", 2),
        ("engines/died/a", 1),
        ("round/time_s", 4.0),
    ]


def test_a_mean_over_tokens_weighs_steps_by_what_they_trained() -> None:
    rows: list[Row] = [{"tokens/trained": 30, "ess": 1.0}, {"tokens/trained": 10, "ess": 0.6}, {"time": 1.0}]
    assert over_tokens(rows, "ess") == pytest.approx(0.9)
    assert over_tokens([], "ess") == 0.0


def test_effective_training_time_counts_what_stayed_over_all_that_passed_on_the_wall() -> None:
    """Steps of 10 s, 6 s of them computed. A restart undid a step that ended at 1,030, and took 30 s."""
    ends_s = (1010.0, 1020.0, 1070.0, 1080.0)
    rows: list[Row] = [
        {"loss": 0.0, "wall_time": wall_time, "time/step": 10.0, "time/train": 6.0} for wall_time in ends_s
    ]
    assert over_wall_time(rows, "time/train") == 4 * 6 / 80
    assert TRIAL_FIGURES["ettr"].total is over_wall_time
