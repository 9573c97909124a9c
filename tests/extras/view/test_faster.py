"""Whether another schedule would be faster, of runs with a known answer."""

import json
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.extras.view.faster import TRIED, fastest

SIMULATED = """
[run]
rounds = 4
group_size = 8

[schedule]
name = "serial"
groups_per_round = 4
groups_per_step = 4

[sampling]
max_completion_tokens = 256

[sim.engines]
count = 2
slots = 16
base_s = 0.02

[sim.lengths]
median_tokens = 100
sigma = 0.1
"""
FEW_STEPS = 256.0
"""Samples of a step for which a trial has the fewest steps."""


def simulated(folder: Path, tokens_per_s: float, **overrides: str) -> Path:
    (folder / "run.toml").write_text(SIMULATED)
    words = ["--sim.trainer.tokens_per_s", str(tokens_per_s), "--output-dir", str(folder / "run")]
    words += [word for key, value in overrides.items() for word in (f"--{key.replace('__', '.')}", value)]
    assert main(["simulate", str(folder / "run.toml"), *words]) == 0
    return folder / "run"


def test_a_run_that_trains_and_generates_in_turn_could_do_both_at_once(tmp_path: Path) -> None:
    """A trainer that never waits is as many times faster as its share of a round says."""
    folder = simulated(tmp_path, 1_600)
    waiting = json.loads((folder / "summary.json").read_text())["round"]["waiting_ratio"]
    found = fastest(folder, FEW_STEPS)
    assert found and found.schedule in TRIED and 0 < found.lag_mean <= 4
    assert found.times == pytest.approx(1 / (1 - waiting), rel=0.1) and found.times > 1.5


def test_nothing_is_said_of_a_run_whose_trainer_takes_all_of_the_time(tmp_path: Path) -> None:
    """No other schedule is simulated, so none is said to be slower."""
    assert fastest(simulated(tmp_path, 10), FEW_STEPS) is None


def test_schedules_outside_of_the_limits_of_the_plan_are_not_named(tmp_path: Path) -> None:
    found = fastest(simulated(tmp_path, 1_600, plan__max_mean_lag="0"), FEW_STEPS)
    assert found and found.lag_mean == 0.0 and found.times == pytest.approx(1.0, abs=0.05)
    assert fastest(tmp_path, FEW_STEPS) is None, "no run"
