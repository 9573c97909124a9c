"""PipelineRL's guard at work: real processes, and a learning rate that takes the weights far from what is in
flight."""

from pathlib import Path

from tailrace.commands.train import train
from tailrace.config import load_config
from tailrace.record.metrics import read_rows

FLOOR = 0.7
U = 2
OVERRIDES = {
    "run.rounds": "14",
    "run.eval_every": "0",
    "run.checkpoint_every": "0",
    "sampling.max_completion_tokens": "24",
    "trainer.learning_rate": "3e-3",
}


def test_the_guard_halts_updates_when_the_weights_run_away_and_lets_them_go_on(config_path: Path) -> None:
    """A ring that holds: it must not fill with what the halted trainer skips."""
    printed = 'name = "rolloutpipe"\nR = 4\nU = 2'
    guarded = f'name = "pipelinerl"\nU = {U}\nH = 32\nroom = 4\nfull = "hold"\ness_floor = {FLOOR}'
    config_path.write_text(config_path.read_text().replace(printed, guarded))
    folder = config_path.parent / "out"
    train(load_config(config_path, OVERRIDES), folder)
    steps = [row for row in read_rows(folder / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 15))
    low = [row["ess/guard"] < FLOOR for row in steps]
    assert not low[0] and True in low, "nothing is stale at first; then the weights run away"
    assert False in low[low.index(True) :], "and what is generated afterwards is near them again"
    for row, halted in zip(steps, low, strict=True):
        assert row.get("groups/dropped/low_ess", 0) == (U if halted else 0)
        assert row["groups/trained"] == U
        if halted:  # what was trained instead
            assert row["staleness/publications"] == 0 and row["ess"] > 0.99
        else:
            assert "groups/dropped/stale" not in row and row["ess"] >= FLOOR
