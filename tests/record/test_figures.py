"""The table of figures, the statistics that rows are made of, and how old tokens are."""

import math

import pytest

from tailrace.record.figures import (
    FIGURES,
    TRIAL_FIGURES,
    Lags,
    Row,
    counts_of,
    family,
    joined,
    length_figures,
    mean,
    of_batch,
    ordered,
    over_tokens,
    over_wall_time,
    standard_deviation,
)
from tailrace.types import Group, Prompt, Sample, SampleId


def sample_of(*spans: tuple[int, int]) -> Sample:
    """A sample of (version, tokens) spans."""
    sample = Sample(SampleId(0, 0, 0), Group(Prompt(0, [1]), 1, []))
    for version, num_tokens in spans:
        sample.grow(num_tokens, version)
    return sample


def test_tokens_are_counted_by_publications_and_by_optimizer_steps() -> None:
    """Versions 0, 1, 2 were published after 0, 4 and 6 steps; now there are 7."""
    lags = Lags()
    for sample in (sample_of((0, 5), (2, 3)), sample_of((1, 2))):
        lags.add(sample, 2, lambda version: 7 - [0, 4, 6][version])
    assert lags.publications == {2: 5, 0: 3, 1: 2}
    assert lags.steps == {7: 5, 1: 3, 3: 2}
    figures = lags.figures(num_samples=2)
    assert (figures["lag/mean"], figures["lag/max"], figures["staleness/max"]) == (4.4, 7, 2)
    assert (figures["carried/tokens"], figures["carried/samples"]) == (0.7, 1.0)


def test_the_profile_is_the_mean_lag_of_each_tenth_of_the_response() -> None:
    lags = Lags()
    lags.add(sample_of((0, 5), (1, 15)), 1, lambda version: 1 - version)
    assert lags.profile == pytest.approx([1, 1, 0.5, 0, 0, 0, 0, 0, 0, 0])
    assert lags.tokens_by_tenth.sum() == pytest.approx(20)
    lags.add(sample_of((0, 20)), 1, lambda version: 1 - version)
    assert lags.profile == pytest.approx([1, 1, 0.75] + [0.5] * 7)


def test_masked_tokens_have_no_lag_and_are_counted_by_their_place_in_the_response() -> None:
    """20 tokens, of which the first 5 are masked; and 10, of which none is."""
    lags, whole = Lags(), sample_of((1, 10))
    masked = sample_of((0, 5), (1, 15))
    masked.num_masked = 5
    for sample in (masked, whole):
        lags.add(sample, 1, lambda version: 7 if version == 0 else 1)
    figures = lags.figures(num_samples=2)
    assert (figures["lag/max"], figures["staleness/max"], figures["carried/samples"]) == (1, 0, 0.0)
    assert figures["tokens/masked"] == 5 and lags.publications.total() == 25
    # of 3 tokens in each of the first two tenths 2 are masked, and in the third one
    assert lags.masked_profile == pytest.approx([2 / 3, 2 / 3, 1 / 3] + [0.0] * 7)
    assert [figures[f"masked/tenth/{tenth}"] for tenth in range(10)] == lags.masked_profile
    rows: list[Row] = [{"tokens/trained": 25.0, **figures}, {"tokens/trained": 20.0}]
    assert of_batch(rows, "tokens/masked") == 5 / 50


def test_a_step_that_masks_nothing_says_nothing_of_it() -> None:
    lags = Lags()
    lags.add(sample_of((1, 10)), 1, lambda version: 0)
    assert not [name for name in lags.figures(1) if "masked" in name]
    assert of_batch([{"tokens/trained": 20.0}], "tokens/masked") == 0.0


def test_a_response_of_one_token_covers_every_tenth() -> None:
    lags = Lags()
    lags.add(sample_of((0, 1)), 3, lambda version: 3)
    assert lags.profile == pytest.approx([3.0] * 10)


def test_no_tokens_have_no_lag() -> None:
    lags = Lags()
    lags.add(sample_of(), 3, lambda version: 3)
    assert lags.profile == [0.0] * 10 and lags.figures(1)["lag/mean"] == 0.0


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
        "eval/accuracy": 0.5,
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
