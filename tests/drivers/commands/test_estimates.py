"""Means of held-out rewards and their intervals, against closed forms and published tables."""

from math import inf, sqrt
from pathlib import Path

import pytest

from tailrace.drivers.commands.intervals import (
    Estimate,
    estimate_of,
    half_width,
    recorded_estimate,
    t_quantile,
    wilson,
)


def estimate(*prompts: list[float]) -> Estimate:
    return estimate_of(prompts)


@pytest.mark.parametrize(
    ("df", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_quantiles_of_student_are_those_of_the_tables(df: int, quantile: float) -> None:
    assert t_quantile(df) == pytest.approx(quantile, abs=5e-5)


def test_the_interval_of_shares_is_that_of_wilson() -> None:
    """Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20 and 1 of 29."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_the_interval_of_solved_prompts_is_that_of_their_share() -> None:
    assert estimate(*[[1.0]] * 8, *[[0.0]] * 2) == (0.8, wilson(0.8, 10), 10)
    assert estimate(*[[1.0]] * 10).interval == pytest.approx((0.7225, 1.0), abs=5e-5)


def test_several_samples_of_a_prompt_count_as_one_prompt() -> None:
    """Four prompts with shares of 0.5, 1, 0 and 0.5: the mean is that of two of four."""
    assert estimate([1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]) == (0.5, wilson(0.5, 4), 4)
    repeated = estimate(*[[1.0] * 16] * 3, [0.0] * 16)
    assert repeated == estimate([1.0], [1.0], [1.0], [0.0])


def test_the_interval_of_other_rewards_is_that_of_student() -> None:
    """Prompts with means 2 and 3: 2.5 +- 12.7062 * sqrt(0.5) / sqrt(2)."""
    half = 12.7062 / 2
    assert estimate([1.0, 3.0], [2.0, 4.0]).interval == pytest.approx((2.5 - half, 2.5 + half), abs=1e-4)
    values = [0.5, 0.6, 0.5, 0.6]
    assert half_width(values) == pytest.approx(3.1824 * sqrt(0.01 / 3) / 2, abs=1e-5)
    assert estimate(*[[0.5]] * 64) == (0.5, (0.5, 0.5), 64)


def test_an_interval_ends_at_0_and_1_only_where_all_rewards_lie_between() -> None:
    assert estimate([1.0], [1.0], [1.0], [0.5]).interval == pytest.approx((0.875 - 0.3978, 1.0), abs=1e-4)
    low, high = estimate([1.0], [1.0], [1.0], [-0.5]).interval or (0.0, 0.0)
    assert low < 0.0 < 1.0 < high


def test_one_prompt_or_a_reward_that_is_not_finite_has_no_interval() -> None:
    alone = estimate([1.0, 0.0, 1.0, 1.0])
    assert alone == (0.75, None, 1) and str(alone) == "one prompt: no interval"
    assert str(estimate([1.0], [0.0])) == "95% interval 0.095 to 0.905"
    assert str(estimate([1.0], [inf])) == "no interval"


def test_an_estimate_is_read_from_the_samples_of_a_round(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    path = tmp_path / "eval" / "round_000012.jsonl"
    lines = [("-1.12/0", "1.0"), ("-1.12/1", "0.0"), ("-2.12/0", "1")]
    path.write_text("".join(f'{{"id":"{id}","reward":{reward}}}\n' for id, reward in lines))
    assert recorded_estimate(tmp_path, 12.0) == (0.75, wilson(0.75, 2), 2)
    for damaged in ("", '{"id":"-1.12/0"', '{"id": 3, "reward": 1}', "\x00"):
        path.write_text(damaged)
        assert recorded_estimate(tmp_path, 12) is None
    assert recorded_estimate(tmp_path, 13) is None
