"""The soft overlong punishment at its corners."""

import pytest

from tailrace.algo.rewards import overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "taken"), [(0, 0.0), (16_384, 0.0), (18_432, 0.5), (20_480, 1.0), (20_481, 1.0)]
)
def test_it_grows_over_the_last_fifth_as_dapo_has_it(num_tokens: int, taken: float) -> None:
    assert overlong_penalty(
        num_tokens, max_completion_tokens=20_480, buffer=0.2, penalty=1.0
    ) == pytest.approx(taken)


def test_it_grows_from_30k_to_32k_as_pipelinerl_has_it() -> None:
    taken = [
        overlong_penalty(n, max_completion_tokens=32_000, buffer=1 / 16, penalty=0.4)
        for n in (30_000, 31_000)
    ]
    assert taken == pytest.approx([0.0, 0.2])
