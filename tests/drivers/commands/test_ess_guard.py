"""PipelineRL's guard in real processes, with a learning rate that makes the sequences in flight
off-policy."""

from pathlib import Path

from tailrace.config import load_config
from tailrace.drivers.assembly.running import train
from tailrace.record.figures import steps_of
from tailrace.record.metrics import read_rows

MIN_ESS = 0.7
GROUPS = 2
OVERRIDES = {
    "run.rounds": "14",
    "run.eval_every": "0",
    "run.checkpoint_every": "0",
    "sampling.max_completion_tokens": "24",
    "trainer.learning_rate": "3e-3",
}


def test_the_guard_halts_updates_when_the_weights_run_away_and_lets_them_go_on(config_path: Path) -> None:
    """The ring blocks: it must not fill with the groups that the halted trainer skips."""
    printed = 'name = "rolloutpipe"\ngroups_per_round = 4\ngroups_per_step = 2'
    guarded = f'name = "pipelinerl"\ngroups_per_step = {GROUPS}\nin_flight_per_engine = 32\n'
    guarded += f'ring_groups = 4\nring_full = "block"\nmin_ess = {MIN_ESS}'
    config_path.write_text(config_path.read_text().replace(printed, guarded))
    folder = config_path.parent / "out"
    train(load_config(config_path, OVERRIDES), folder)
    steps = steps_of(read_rows(folder / "metrics.jsonl"))
    assert [row["step"] for row in steps] == list(range(1, 15))
    low = [row.get("ess/guard", 1.0) < MIN_ESS for row in steps]
    assert not low[0] and True in low, "nothing is stale at first; then the weights run away"
    assert False in low[low.index(True) :], "and what is generated afterwards is near them again"
    for row, halted in zip(steps, low, strict=True):
        assert row.get("groups/dropped/low_ess", 0) == (GROUPS if halted else 0)
        assert row["groups/trained"] == GROUPS
        if halted:  # what was trained instead
            assert row["staleness/max"] == 0 and row["ess"] > 0.99
        else:
            assert "groups/dropped/stale" not in row and row["ess"] >= MIN_ESS
