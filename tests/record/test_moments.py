import math

import pytest

from tailrace.record.moments import mean, standard_deviation


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
