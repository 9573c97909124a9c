import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.algo.advantages import gae, group_advantages


def test_group_scale_divides_by_the_sample_deviation() -> None:
    # mean 0.25; sum of squares 0.75; / 3 = 0.25; std 0.5
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale="group") == [
        0.75 / 0.5001,
        *[-0.25 / 0.5001] * 3,
    ]


def test_no_scale_only_subtracts_the_mean() -> None:
    assert group_advantages([3.0, 1.0, 2.0], scale="none") == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("scale", ["group", "none", "rloo"])
@pytest.mark.parametrize("rewards", [[0.7], [1.0] * 8, [0.0, 0.0]])
def test_equal_rewards_have_no_advantage(rewards: list[float], scale: str) -> None:
    assert group_advantages(rewards, scale=scale) == [0.0] * len(rewards)  # type: ignore[arg-type]


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=16))
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[int]) -> None:
    advantages = group_advantages([reward / 7 for reward in rewards], scale="group")
    assert math.isclose(math.fsum(advantages), 0.0, abs_tol=1e-9)
    places = range(len(rewards))
    assert sorted(places, key=rewards.__getitem__) == sorted(places, key=advantages.__getitem__)


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    # 3 - (1 + 2) / 2, 1 - (3 + 2) / 2, 2 - (3 + 1) / 2
    assert group_advantages([3.0, 1.0, 2.0], scale="rloo") == pytest.approx([1.5, -1.5, 0.0])


def test_gae_by_hand() -> None:
    # delta = [0.5 * 0.4 - 0.2, 0.5 * 0.6 - 0.4, 1 - 0.6] = [0, -0.1, 0.4]
    # A = [0 + 0.4 * 0.06, -0.1 + 0.4 * 0.4, 0.4], gamma lambda = 0.4
    found = gae([0.2, 0.4, 0.6], 1.0, gamma=0.5, gae_lambda=0.8)
    assert found == pytest.approx([0.024, 0.06, 0.4])


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=20), st.floats(-2, 2))
def test_gae_of_lambda_one_is_the_return_and_of_lambda_zero_one_step(
    values: list[float], reward: float
) -> None:
    gamma, last = 0.9, len(values) - 1
    returns = [gamma ** (last - t) * reward - value for t, value in enumerate(values)]
    assert gae(values, reward, gamma=gamma, gae_lambda=1.0) == pytest.approx(returns, abs=1e-9)
    after = [*(gamma * value for value in values[1:]), reward]
    steps = [later - value for later, value in zip(after, values, strict=True)]
    assert gae(values, reward, gamma=gamma, gae_lambda=0.0) == pytest.approx(steps, abs=1e-9)


def test_without_discount_and_lambda_it_is_reward_minus_value() -> None:
    """PipelineRL, eq. 4."""
    assert gae([0.5, 0.25], 1.0, gamma=1.0, gae_lambda=1.0) == [0.5, 0.75]


@pytest.mark.parametrize("largest", [1e200, 1e308, 1.7e308])
def test_huge_rewards_have_the_advantages_of_small_ones_in_the_same_proportion(largest: float) -> None:
    found = group_advantages([largest, 0.0, 0.0, 0.0], scale="group")
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5])  # a deviation of largest / 2
    assert group_advantages([largest, 0.0, 0.0, 0.0], scale="none") == pytest.approx(
        [largest * 0.75, *[-largest / 4] * 3]
    )


@pytest.mark.parametrize("scale", ["none", "rloo"])
def test_a_difference_beyond_the_range_of_a_float_is_infinite(scale: Literal["none", "rloo"]) -> None:
    assert group_advantages([1.7e308] * 7 + [-1.7e308], scale=scale)[-1] == -math.inf
