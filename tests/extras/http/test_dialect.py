"""What a request to a server asks for."""

import pytest

from tailrace.extras.http.dialect import Attempt


@pytest.mark.parametrize(
    ("greedy", "own", "asked"), [(False, None, 0.8), (False, 0.6, 0.6), (True, None, 0.0), (True, 0.6, 0.0)]
)
def test_a_sample_may_have_a_temperature_of_its_own(greedy: bool, own: float | None, asked: float) -> None:
    attempt = Attempt("a", [1], 5, seed=0, greedy=greedy, salt="", temperature=own)
    assert attempt.temperature_or(0.8) == asked
