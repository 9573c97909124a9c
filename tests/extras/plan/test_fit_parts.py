"""Least squares, overlaps and correlations by hand."""

import numpy as np
import pytest

from tailrace.extras.plan.fit import correlation_within_groups, least_squares, non_negative, overlap
from tailrace.record.events import Interval


def test_coefficients_are_found_and_all_variance_is_explained() -> None:
    columns = {"one": np.array([1.0, 1, 1, 1]), "more": np.array([0.0, 1, 2, 5])}
    found = non_negative(columns, np.array([2.0, 5, 8, 17]))
    assert found.coefficients == pytest.approx({"one": 2, "more": 3})
    assert found.explained == pytest.approx(1)


def test_a_coefficient_that_would_be_negative_is_0_and_the_others_are_fitted_without_it() -> None:
    columns = {"one": np.array([1.0, 1, 1, 1]), "more": np.array([0.0, 1, 2, 5])}
    found = non_negative(columns, np.array([4.0, 3, 2, 1]))
    assert found.coefficients == pytest.approx({"one": 2.5, "more": 0})
    assert found.explained == pytest.approx(0)


def test_of_two_columns_that_grow_alike_the_later_is_left_out() -> None:
    columns = {"one": np.array([1.0, 2, 3]), "double": np.array([2.0, 4, 6])}
    found = non_negative(columns, np.array([3.0, 6, 9]))
    assert found.coefficients == pytest.approx({"one": 3})


def test_a_column_of_zeros_has_the_coefficient_0() -> None:
    columns = {"one": np.array([1.0, 2]), "never": np.zeros(2)}
    assert non_negative(columns, np.array([2.0, 4])).coefficients == pytest.approx({"one": 2, "never": 0})


def test_the_least_squares_are_those_of_scipy_on_random_problems() -> None:
    nnls = pytest.importorskip("scipy.optimize", reason="pip install 'tailrace[dev]'").nnls
    rng, num_bound = np.random.default_rng(0), 0
    for _ in range(200):
        columns = int(rng.integers(1, 9))
        matrix = rng.normal(rng.normal(), 1.0, (columns + int(rng.integers(0, 40)), columns))
        matrix *= 10.0 ** rng.uniform(-6, 6, columns)
        target = matrix @ rng.normal(size=columns) + rng.normal(size=len(matrix))
        expected, _ = nnls(matrix, target)
        np.testing.assert_allclose(least_squares(matrix, target), expected, rtol=1e-6, atol=0.0)
        num_bound += int(np.sum(expected == 0))
    assert num_bound > 200, "coefficients of 0 are among them"


def test_overlaps_are_counted_once() -> None:
    busy = [Interval(4.0, 6.0), Interval(0.0, 2.0), Interval(1.0, 3.0)]
    work = [Interval(*each) for each in ((0.0, 6.0), (2.5, 4.5), (3.0, 4.0), (5.0, 9.0), (-1.0, 0.5))]
    assert overlap(work, busy).tolist() == [5.0, 1.0, 0.0, 1.0, 0.5]
    assert overlap(work, []).tolist() == [0.0] * 5


def test_groups_whose_responses_are_equally_long_have_the_correlation_1() -> None:
    assert correlation_within_groups({(p, n): 10 * p + 1 for p in range(5) for n in range(4)}) == 1.0


def test_groups_that_are_all_alike_have_the_correlation_0() -> None:
    assert correlation_within_groups({(p, n): 10 * n + 1 for p in range(5) for n in range(4)}) == 0.0


def test_a_single_response_of_each_prompt_has_no_correlation() -> None:
    assert correlation_within_groups({(p, 0): p + 1 for p in range(5)}) is None


def test_with_variances_in_proportion_to_a_column_the_sums_agree() -> None:
    columns = {"work": np.array([1.0, 2, 4, 9]), "one": np.ones(4)}
    found = non_negative(columns, np.array([1.0, 3, 9, 31]), columns["work"])
    assert found.coefficients["one"] == 0
    assert found.coefficients["work"] * 16 == pytest.approx(44)
