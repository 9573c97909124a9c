"""PipelineRL with a reward that is slower than the engine, in real processes: its rings fill."""

from pathlib import Path

import pytest

from tailrace.config import load_config
from tailrace.drivers.assembly.running import train
from tailrace.record.events import Row
from tailrace.record.figures import largest, steps_of, summed
from tailrace.record.metrics import read_rows

STEPS, GROUP_SIZE, RING, IN_FLIGHT = 16, 2, 3, 8
OVERRIDES = {"run.rounds": str(STEPS), "run.eval_every": "0", "run.checkpoint_every": "0"}
SLOW = """
import time

def slow(completion):
    time.sleep(0.05)
    return float(len(completion) % 3)
"""


def slow_run(config_path: Path, ring_full: str) -> list[Row]:
    (config_path.parent / "rewards.py").write_text(SLOW)
    printed = 'name = "rolloutpipe"\ngroups_per_round = 4\ngroups_per_step = 2'
    rings = f'ring_groups = {RING}\nscoring_groups = 2\nring_full = "{ring_full}"'
    pipelinerl = f'name = "pipelinerl"\ngroups_per_step = 2\nin_flight_per_engine = {IN_FLIGHT}\n{rings}'
    config = config_path.read_text().replace(printed, pipelinerl).replace(":digits", ":slow")
    config_path.write_text(config)
    train(load_config(config_path, OVERRIDES), config_path.parent / "out")
    return read_rows(config_path.parent / "out" / "metrics.jsonl")


@pytest.mark.parametrize("ring_full", ["block", "drop_oldest"])
def test_rings_bound_groups_and_lag_where_the_reward_is_slow(config_path: Path, ring_full: str) -> None:
    rows = slow_run(config_path, ring_full)
    steps = steps_of(rows)
    assert len(steps) == STEPS
    assert largest(steps, "stage/groups/scoring") == 2
    assert largest(steps, "stage/groups/generated") <= RING
    assert largest(steps, "stage/groups/ready") <= RING
    blocked_s, dropped = (
        summed(rows, "stage/blocked_s/generated"),
        summed(rows, "groups/dropped/generated_overflow"),
    )
    assert (blocked_s > 0, dropped > 0) == (ring_full == "block", ring_full == "drop_oldest")
    lags = [row["lag/max"] for row in steps]
    assert max(lags[STEPS // 2 :]) <= max(lags[: STEPS // 2]) + 1, "the lag has stopped growing"
    assert max(lags) < STEPS / 2, "without rings it grows by nearly a step each step"
