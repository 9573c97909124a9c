"""The trackers that are installed, each offline, and what they stored read back."""

import math
from pathlib import Path

import pytest
from record_story import WALL_TIME, pipelined_round, play

from tailrace.errors import ConfigError
from tailrace.record.metrics import MetricsWriter
from tailrace.record.sinks import TrackedRun, TrackerSink, check_trackers, open_trackers


class Book:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int, float]] = []
        self.finished = False

    def log(self, figures: dict[str, float], step: int, wall_time: float) -> None:
        self.logged.append((figures, step, wall_time))

    def finish(self) -> None:
        self.finished = True


def run_in(folder: Path, life: int = 1, step: int = 0) -> TrackedRun:
    return TrackedRun("tests", folder, {"run": {"seed": 3}}, life, step)


def test_a_tracker_gets_the_objects_of_the_metrics_file(tmp_path: Path) -> None:
    book = Book()
    play(pipelined_round().events, TrackerSink(book), MetricsWriter(tmp_path / "metrics.jsonl"))
    assert [(step, wall_time) for _, step, wall_time in book.logged] == [(1, WALL_TIME), (2, WALL_TIME)]
    first, second = (figures for figures, _, _ in book.logged)
    assert first["completions/mean_length"] == 5.0 and first["frac_reward_zero_std"] == 0.0
    assert second["round/waiting_ratio"] == pytest.approx(8 / 14)
    assert all(math.isfinite(value) for value in (*first.values(), *second.values()))
    assert book.finished


def test_a_missing_package_is_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.record.sinks.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"record.trackers = 'wandb': the package wandb is not installed; pip"
    ):
        check_trackers(["wandb"])


def test_a_tracker_that_cannot_begin_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file in the place of its folder")
    with pytest.raises(ConfigError, match="it cannot begin a run"):
        open_trackers(["tensorboard"], run_in(tmp_path), print)


def test_the_lives_of_a_run_are_one_group(tmp_path: Path) -> None:
    names = [(run.name, run.group) for run in (run_in(tmp_path / "r"), run_in(tmp_path / "r", life=2))]
    assert names == [("r", "r"), ("r-life2", "r")]


def test_tensorboard_has_every_figure_and_drops_steps_that_are_made_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'tailrace[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(pipelined_round().events, *open_trackers(["tensorboard"], run_in(tmp_path), print))
    play(pipelined_round().events, *open_trackers(["tensorboard"], run_in(tmp_path, life=2, step=0), print))
    stored = EventAccumulator(str(tmp_path / "tensorboard"))
    stored.Reload()
    assert [(each.step, each.value) for each in stored.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    assert "completions/max_length" in stored.Tags()["scalars"]


def test_wandb_stores_every_figure_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'tailrace[wandb]'")
    for name, value in (
        ("MODE", "offline"),
        ("SILENT", "true"),
        ("DISABLE_GIT", "true"),
        ("DISABLE_CODE", "true"),
    ):
        monkeypatch.setenv(f"WANDB_{name}", value)
    play(pipelined_round().events, *open_trackers(["wandb"], run_in(tmp_path), print))
    import wandb

    wandb.teardown()  # waits for its process, which writes the file
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"completions/mean_length" in path.read_bytes()


def test_trackio_stores_every_figure_in_its_own_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="pip install 'tailrace[trackio]'")
    import sqlite3

    play(pipelined_round().events, *open_trackers(["trackio"], run_in(tmp_path), print))
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [step for step, _ in rows] == [1, 2] and b"completions/mean_length" in rows[0][1]
