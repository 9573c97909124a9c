"""verl's tables: what is fitted, the rule by which prompts are drawn, and the modes of the V1 trainer."""

from collections.abc import Iterator
from functools import partial

import pytest

from reproductions import verl
from reproductions.verl import ASYNC, PAPER, SYNC, UPDATE_S, V1, V1_SYNC, fully_async, judged, v1_step
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.simulation import simulate
from tailrace.sim.settings import SimSettings

QUICK = SimSettings.model_validate(
    {
        "lengths": {"median_tokens": 100, "max_tokens": 1000},
        "trainer": {"step_s": 5.0},
        "rewards": {"median_s": 0},
    }
)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(verl, "V1_ROUNDS", 6)
    v1_step.cache_clear()
    yield
    v1_step.cache_clear()


@pytest.mark.parametrize("staleness", [0.0, 0.5, 1.0])
def test_only_a_threshold_above_zero_draws_prompts_ahead(staleness: float) -> None:
    schedule = partial(fully_async, groups_per_sync=16, groups_per_step=4, alive=int((1 + staleness) * 16))
    done = simulate(schedule, QUICK, RunSettings(rounds=6, group_size=2))
    assert len(done.steps) == 6 * 4
    assert (done.figures["staleness_max"] == 0) == (staleness == 0)


def test_a_larger_threshold_is_faster_because_the_trainer_waits_less() -> None:
    def seconds(staleness: float) -> float:
        schedule = partial(
            fully_async, groups_per_sync=16, groups_per_step=4, alive=int((1 + staleness) * 16)
        )
        return simulate(schedule, QUICK, RunSettings(rounds=6, group_size=2)).seconds

    assert seconds(0.0) > seconds(0.5)


def test_the_trainer_takes_the_printed_time_of_the_synchronous_row_with_as_many_devices() -> None:
    sim = verl.h20(128, 64)
    tokens = verl.GROUPS * verl.K * (verl.MEAN + verl.PROMPT)
    assert tokens / sim.trainer.tokens_per_s == pytest.approx(SYNC[64][2])
    assert UPDATE_S[16] == 2 * SYNC[32][2]


def test_the_synchronous_mode_is_fitted_and_both_asynchronous_ones_are_much_faster() -> None:
    steps = {mode.name: v1_step(mode, 0) for mode in V1}
    assert steps["sync"] == pytest.approx(V1_SYNC.step_s, rel=0.02)
    assert all(steps[name] < 0.8 * steps["sync"] for name in ("colocate_async", "separate_async"))
    assert steps["switch"] < steps["no-switch"]


def test_the_median_error_leaves_fitted_rows_out_and_pairs_in_the_opposite_order_are_counted() -> None:
    figures = judged(
        [("64 H20, sync", 400.0, 500.0), ("a", 200.0, 220.0), ("b", 100.0, 240.0), ("c", 50.0, 40.0)]
    )
    middle, pairs = figures[-2:]
    assert (middle.ours, middle.holds) == (pytest.approx(20.0), False)
    assert (pairs.row, pairs.ours, pairs.holds) == ("6 pairs of rows", 1, False)
    kinds = {figure.row: figure.kind for figure in figures if figure.what == "step"}
    assert kinds == {"64 H20, sync": "fitted", "a": "predicted", "b": "predicted", "c": "predicted"}


def test_no_asynchronous_row_is_fitted_but_in_the_table_that_says_so() -> None:
    fitted = {each.source: each.number for each in PAPER.parameters if each.kind == "fitted"}
    assert fitted == {
        "the update_actor of synchronous rows": 3,
        "its update_actor": len(ASYNC),
        "the synchronous row": 1,
    }
