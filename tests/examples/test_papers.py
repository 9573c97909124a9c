"""The example of each paper: it trains as it stands."""

import math
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.record.metrics import read_rows

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = [
    "--run.rounds",
    "2",
    "--run.eval_every",
    "0",
    "--run.eval_prompts",
    "8",
    "--run.checkpoint_every",
    "0",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["april_dapo", "critic", "pipelinerl", "rollpacker"])
def test_the_example_of_a_paper_trains_and_its_books_close(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", str(EXAMPLES / f"{name}.toml"), "--output-dir", str(run), *SHORT]) == 0
    steps = [row for row in read_rows(run / "metrics.jsonl") if "loss" in row]
    assert len(steps) >= 2 and all(math.isfinite(row["grad_norm"]) for row in steps)
    assert main(["inspect", str(run)]) == 0
    assert sum(row["reward"] for row in steps) > 0
