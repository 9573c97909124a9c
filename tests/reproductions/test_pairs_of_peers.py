"""Pairs of other projects: what is fitted takes the printed time, and when the next one begins decides."""

from functools import partial

import pytest

from reproductions import peers
from reproductions.peers import (
    LONGER_S,
    ROLLOUTS,
    SMALL,
    UNIRL,
    UNIRL_S,
    Pair,
    Trainer,
    predicted,
    refilled,
)
from tailrace.schedules.serial import serial

QUICK = Pair("quick", 8, 2, 8, 2048, (1, 1), 300.0, (Trainer(100.0), Trainer(100.0)))


def test_a_synchronous_run_takes_the_printed_times_of_its_parts() -> None:
    rounds = predicted(QUICK, partial(serial, groups_per_round=8, groups_per_step=8), 0, 0, rounds=3)
    assert rounds.figures["rollout_time_s"] == pytest.approx(300.0, rel=1e-3)
    assert rounds.figures["trainer_compute_s"] == pytest.approx(100.0, rel=1e-3)


def test_a_rollout_that_begins_after_training_gains_nothing_and_one_before_it_hides_the_training() -> None:
    late_s, early_s = (
        predicted(QUICK, partial(refilled, groups_per_round=8, early=early), 0, rounds=3).seconds
        for early in (False, True)
    )
    assert late_s == pytest.approx(3 * 400.0, rel=1e-3)
    assert early_s == pytest.approx(3 * 300.0 + 100.0, rel=0.03), (
        "each rollout but the first hides a training"
    )


def test_the_printed_walls_of_eighteen_rollouts_give_the_parts_of_one() -> None:
    shorter_s = UNIRL.trainers[0].passes_s
    assert ROLLOUTS * (LONGER_S + shorter_s) == pytest.approx(UNIRL_S["separate"])
    assert ROLLOUTS * LONGER_S + shorter_s == pytest.approx(UNIRL_S["refilled"])
    assert shorter_s < LONGER_S


def test_a_trainer_that_does_not_scale_is_given_and_one_that_does_has_a_constant() -> None:
    assert [each.passes_s for each in SMALL.trainers] == [430.263, 435.874]
    update_s = 4 * peers.PASSES_30B + peers.UPDATES_30B * peers.CONSTANT_S
    assert update_s == pytest.approx(206.63, rel=0.1), "on a quarter of the devices: 2.4 times as long, not 4"
