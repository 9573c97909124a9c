import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.algo.advantages import group_advantages


def test_group_scale_divides_by_the_sample_deviation() -> None:
    # mean 0.25; sum of squares 0.75; / 3 = 0.25; std 0.5
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale="group") == [
        0.75 / 0.5001,
        *[-0.25 / 0.5001] * 3,
    ]


def test_no_scale_only_subtracts_the_mean() -> None:
    assert group_advantages([3.0, 1.0, 2.0], scale="none") == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("rewards", [[0.7], [1.0] * 8, [0.0, 0.0]])
def test_equal_rewards_have_no_advantage(rewards: list[float], scale: str) -> None:
    assert group_advantages(rewards, scale=scale) == [0.0] * len(rewards)  # type: ignore[arg-type]


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=16))
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[int]) -> None:
    advantages = group_advantages([reward / 7 for reward in rewards], scale="group")
    assert math.isclose(math.fsum(advantages), 0.0, abs_tol=1e-9)
    places = range(len(rewards))
    assert sorted(places, key=rewards.__getitem__) == sorted(places, key=advantages.__getitem__)
