"""The whole path in one file: data, rollout, reward, advantage, loss, step, new weights."""

import runpy
from pathlib import Path

import pytest

NANO = Path(__file__).parents[2] / "examples" / "nano.py"


@pytest.mark.slow
def test_the_whole_path_learns_sums_in_twenty_rounds() -> None:
    rewards = runpy.run_path(str(NANO), run_name="nano")["main"]()
    assert len(rewards) == 20 and rewards[0] < 0.5 and rewards[-1] > 0.9


def test_the_whole_path_is_a_hundred_lines() -> None:
    assert len(NANO.read_text(encoding="utf-8").splitlines()) <= 100
