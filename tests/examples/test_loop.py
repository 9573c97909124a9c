"""The first file to read: data, reward and schedule of its own, in one short script."""

import runpy
from pathlib import Path

import pytest

LOOP = Path(__file__).parents[2] / "examples" / "loop.py"


def test_the_loop_trains_with_its_own_data_reward_and_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    summary = runpy.run_path(str(LOOP), run_name="loop")["main"](rounds=2)
    assert (summary.rounds, summary.steps, summary.groups.trained) == (2, 2, 32)
    assert summary.tokens.generated == summary.tokens.trained and summary.eval is not None
    assert (tmp_path / "runs" / "loop" / "run" / "model" / "config.json").exists()


def test_the_loop_fits_a_screen_or_two() -> None:
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) <= 60
