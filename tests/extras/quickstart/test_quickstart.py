"""`tailrace quickstart` trains with the files of the package, wherever it is called."""

from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.record.metrics import read_rows

SHORT = {"run.rounds": "1", "run.eval_every": "0", "schedule.groups_per_round": "2"}


@pytest.mark.slow
def test_a_first_run_needs_no_file_and_no_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for key, value in SHORT.items() for word in (f"--{key}", value)]
    assert main(["quickstart", *words, "--schedule.groups_per_step", "2"]) == 0
    (row,) = [row for row in read_rows(tmp_path / "runs" / "quickstart" / "metrics.jsonl") if "loss" in row]
    assert row["samples/trained"] == 16
    assert (tmp_path / "runs" / "quickstart" / "model" / "model.safetensors").exists()
