"""Sinks that a user asks for: own ones and trackers."""

import math
from pathlib import Path

import pytest

from helpers.record_story import WALL_TIME, pipelined_round, play
from tailrace.config import changed_keys, load_config, may_change
from tailrace.errors import ConfigError
from tailrace.record.metrics import MetricsWriter
from tailrace.record.sinks import TrackedRun, TrackerSink, check_trackers, open_sinks, open_trackers


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


SINKS = """
class Writer:
    def __init__(self, folder, until=10**9):
        self.path, self.until, self.names = folder / "events.txt", until, []
    def on(self, event):
        if len(self.names) == self.until:
            raise RuntimeError("full")
        self.names.append(type(event).__name__)
    def close(self):
        self.path.write_text(" ".join(self.names))

def good(folder): return Writer(folder)
def breaks(folder): return Writer(folder, until=2)
def broken(folder): raise KeyError("token")
def none(folder): return None
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SINKS)
    return tmp_path / "mine.py"


def test_a_users_sink_receives_events_and_rows(file: Path, tmp_path: Path) -> None:
    play(pipelined_round().events, *open_sinks([f"{file}:good"], tmp_path, print))
    names = (tmp_path / "events.txt").read_text().split()
    assert names[0] == "RoundStarted" and names[-3:] == ["RoundEnded", "RoundBound", "dict"]
    assert [names[n + 1] for n, name in enumerate(names) if name == "Stepped"] == ["dict"] * 2


def test_a_sink_that_raises_is_disabled_with_one_line_and_the_others_go_on(
    file: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    sinks = open_sinks([f"{file}:breaks", f"{file}:good"], tmp_path, said.append)
    play(pipelined_round().events, *sinks)
    assert said == [f"Sink {file}:breaks is disabled | on(RequestStarted) raised RuntimeError: full"]
    assert "RoundBound dict" in (tmp_path / "events.txt").read_text()


def test_a_sink_that_cannot_close_says_so(file: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (sink,) = open_sinks([f"{file}:good"], tmp_path / "missing", said.append)
    play([], sink)
    assert len(said) == 1 and "close() raised FileNotFoundError" in said[0]


@pytest.mark.parametrize(
    "name, problem",
    [
        ("broken", "it raised KeyError: 'token'"),
        ("none", "it returned a NoneType, which is no sink"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_what_makes_no_sink_is_refused(name: str, problem: str, file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        open_sinks([f"{file}:{name}"], tmp_path, print)
    assert problem in str(refused.value) and "record.sinks" in str(refused.value)


def test_a_path_in_the_config_is_relative_to_the_config(file: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = 'serial'\n"
        "[record]\nsinks = ['mine.py:good', 'package.module:sink']\n"
    )
    config = load_config(tmp_path / "run.toml")
    assert config.record.sinks == (f"{file}:good", "package.module:sink")


def test_what_is_recorded_may_change_when_a_run_goes_on(file: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = 'serial'\n")
    config = load_config(tmp_path / "run.toml")
    changed = load_config(tmp_path / "run.toml", {"record.alarm_kl": "0.5", "record.sinks": "['a:b']"})
    keys = changed_keys(config.to_json(), changed).keys()
    assert keys == {"record.alarm_kl", "record.sinks"} and all(map(may_change, keys))
