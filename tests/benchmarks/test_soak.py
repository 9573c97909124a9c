"""The benchmark of long runs, with a short one."""

import pytest

import soak


def test_memory_is_looked_at_while_a_run_trains() -> None:
    looks = soak.measure(rounds=30, every=10, words=("--run.rounds", "20"))
    assert [round for round, *_ in looks] == [10, 20]
    assert all(20 < controller < 1000 and 100 < others < 10_000 for _, controller, others in looks)


def test_growth_is_the_slope_after_the_first_tenth() -> None:
    looks = [(n, 100 + n / 2000 + 50 * (n < 100), 300 + n / 100) for n in range(50, 1001, 50)]
    assert soak.growth(looks) == pytest.approx({"controller_mb_per_1000": 0.5, "workers_mb_per_1000": 10.0})
