"""Trackers of any kind get the objects of metrics.jsonl."""

import math
from pathlib import Path

import pytest

from helpers.record_story import WALL_TIME, pipelined_round, play
from tailrace.drivers.kinds.tracker import TrackedRun, TrackerSink, check_trackers
from tailrace.errors import ConfigError
from tailrace.record.metrics import MetricsWriter


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
    assert [*first][:2] == [*second][:2] == ["reward", "loss"], "what a person looks for comes first"


def test_a_missing_package_is_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.drivers.kinds.tracker.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"record.trackers = 'wandb': the package wandb is not installed; (uv )?pip"
    ):
        check_trackers(["wandb"])


def test_the_lives_of_a_run_are_one_group(tmp_path: Path) -> None:
    names = [(run.name, run.group) for run in (run_in(tmp_path / "r"), run_in(tmp_path / "r", life=2))]
    assert names == [("r", "r"), ("r-life2", "r")]


def test_a_tracker_that_nobody_has_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"record.trackers = 'wanbd': .* did you mean 'wandb'"):
        check_trackers(["wanbd"])
