"""The page of a run of real parts: every second has a cause, and samples have the columns of their rows."""

from pathlib import Path

import pytest

from helpers.small_run import train_here, write_small_run
from tailrace.extras.view.faster import TRIED
from tailrace.extras.view.run import open_runs

pytest.importorskip("starlette", reason="no page: pip install 'tailrace[view]'")


def test_every_second_of_a_run_that_saves_and_evaluates_has_a_cause(tmp_path: Path) -> None:
    assert train_here(write_small_run(tmp_path)) == 0
    (run,) = open_runs([tmp_path / "out"])
    record = run.record()
    seconds = {each["cause"]: each["seconds"] for each in record["shares"] if each["lane"] == "trainer"}
    assert sum(seconds.values()) == pytest.approx(record["recorded_s"])
    assert {"gradients", "step", "publication", "evaluation", "checkpoint"} <= seconds.keys()
    listed = run.samples("trained")["samples"]
    assert len(listed) == 24
    found = run.faster()
    assert found["schedule"] in (*TRIED, "serial") and found["times"] >= 1.0 and run.faster() == found
    (tmp_path / "out" / "summary.json").unlink()
    assert run.faster() == {}, "a run that goes on"
    assert run.sample(listed[0]["id"])["record"]["columns"].keys() == {"prompt"}
