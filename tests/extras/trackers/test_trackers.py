"""Each tracker stores every figure of a run. Its package is the real one."""

import json
from pathlib import Path

import pytest

from helpers.record_story import pipelined_round, play
from tailrace.drivers.kinds.tracker import TrackedRun, open_trackers
from tailrace.errors import ConfigError
from tailrace.record.events import Event, Stepped


def run_in(folder: Path, life: int = 1, step: int = 0) -> TrackedRun:
    return TrackedRun("tests", folder, {"run": {"seed": 3}}, life, step)


def told() -> list[Event]:
    """A round whose samples have texts."""
    events = pipelined_round().events
    for step in (event for event in events if isinstance(event, Stepped)):
        for number, sample in enumerate(step.samples):
            sample.text = f"r{number}"
    return events


def test_samples_for_trackers_that_take_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"record\.tracker_samples = 2: no tracker .* takes samples \(tensorb"
    ):
        open_trackers(["tensorboard"], run_in(tmp_path), print, 2)


def test_a_tracker_that_cannot_begin_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file in the place of its folder")
    with pytest.raises(ConfigError, match="it cannot begin a run"):
        open_trackers(["tensorboard"], run_in(tmp_path), print)


def test_tensorboard_has_every_figure_and_drops_steps_that_are_made_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'tailrace[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(pipelined_round().events, *open_trackers(["tensorboard"], run_in(tmp_path), print))
    play(pipelined_round().events, *open_trackers(["tensorboard"], run_in(tmp_path, life=2, step=0), print))
    stored = EventAccumulator(str(tmp_path / "tensorboard"))
    stored.Reload()
    assert [(each.step, each.value) for each in stored.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    assert "completions/max_length" in stored.Tags()["scalars"]


@pytest.mark.parametrize("num_samples", [0, 1])
def test_wandb_stores_every_figure_and_the_samples_that_it_may_have_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_samples: int
) -> None:
    pytest.importorskip("wandb", reason="pip install 'tailrace[wandb]'")
    for name, value in (
        ("MODE", "offline"),
        ("SILENT", "true"),
        ("DISABLE_GIT", "true"),
        ("DISABLE_CODE", "true"),
    ):
        monkeypatch.setenv(f"WANDB_{name}", value)
    play(told(), *open_trackers(["wandb"], run_in(tmp_path), print, num_samples))
    import wandb

    wandb.teardown()  # waits for its process, which writes the file
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"completions/mean_length" in path.read_bytes()
    tables = [json.loads(file.read_text()) for file in path.parent.glob("files/media/table/*.json")]
    rows = sorted(row for table in tables for row in table["data"])
    assert rows == [[1, "question 0", "r0", 1.0], [2, "question 1", "r0", 1.0]][: 2 * num_samples]
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert (b"question 0" in stored) == (num_samples > 0), "no text leaves unless it is asked for"


def test_trackio_stores_every_figure_in_its_own_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="pip install 'tailrace[trackio]'")
    import sqlite3

    play(told(), *open_trackers(["trackio"], run_in(tmp_path), print, 1))
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert {step for step, _ in rows} == {1, 2}
    stored = b"".join(text if isinstance(text, bytes) else text.encode() for _, text in rows)
    assert b"completions/mean_length" in stored and b"samples" in stored


@pytest.mark.filterwarnings("ignore")  # of the packages of MLflow
def test_mlflow_stores_every_figure_by_step_and_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install 'tailrace[mlflow]'")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    for life in (1, 2):  # the second finds the experiment of the first
        play(told(), *open_trackers(["mlflow"], run_in(tmp_path / "r", life), print, life - 1))
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tests")
    first, second = client.search_runs([experiment.experiment_id], order_by=["start_time"])
    assert (first.info.run_name, second.info.run_name, second.data.tags["group"]) == ("r", "r-life2", "r")
    assert first.info.status == "FINISHED" and first.data.metrics["completions/max_length"] > 0
    history = client.get_metric_history(first.info.run_id, "reward")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 1.0)]
    assert [file.path for file in client.list_artifacts(first.info.run_id)] == ["config.json"]
    table = client.load_table(experiment.experiment_id, "samples.json", [second.info.run_id])
    assert table[["step", "response"]].values.tolist() == [[1, "r0"], [2, "r0"]]


def test_swanlab_stores_every_figure_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab", reason="pip install 'tailrace[swanlab]'")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    play(pipelined_round().events, *open_trackers(["swanlab"], run_in(tmp_path), print))
    stored = b"".join(file.read_bytes() for file in (tmp_path / "swanlab").rglob("*") if file.is_file())
    assert b"completions/mean_length" in stored
