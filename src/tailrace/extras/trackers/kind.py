"""The trackers. A package is imported when a run begins in it.

Each life of a run is a run of its own in trackio, W&B, MLflow and SwanLab, in one group. TensorBoard drops
the steps that a resumed run makes again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from typing_extensions import override

from tailrace.drivers.kinds.tracker import SAMPLE_COLUMNS, TrackedRun, TrackedSample, Tracker, TrackerKind


class ServiceTracker:
    """A run in trackio, W&B or SwanLab, whose interfaces are alike."""

    def __init__(self, run: Any, *left_out: str, table: Callable[..., Any] | None = None) -> None:
        self._run, self._left_out, self._table = run, left_out, table

    def log(self, figures: Mapping[str, float], step: int, wall_time: float) -> None:
        self._run.log({key: figures[key] for key in figures if key not in self._left_out}, step=step)

    def log_samples(self, rows: Sequence[TrackedSample], step: int) -> None:
        assert self._table
        self._run.log({"samples": self._table([*SAMPLE_COLUMNS], [list(row) for row in rows])}, step=step)

    def finish(self) -> None:
        with redirect_stdout(StringIO()):
            self._run.finish()


def arguments(run: TrackedRun) -> dict[str, Any]:
    """Return the arguments that the `init` of these three have in common."""
    return {"project": run.project, "name": run.name, "group": run.group, "config": dict(run.config)}


class Trackio(TrackerKind):
    package = "trackio"
    takes_samples = True

    @override
    def begin(self, run: TrackedRun) -> Tracker:
        import trackio

        with redirect_stdout(StringIO()):  # its banner
            begun = trackio.init(**arguments(run), embed=False)
        # It has a `time` of its own.
        return ServiceTracker(begun, "time", table=trackio.Table)


class Wandb(TrackerKind):
    package = "wandb"
    takes_samples = True

    @override
    def begin(self, run: TrackedRun) -> Tracker:
        import wandb

        settings = wandb.Settings(console="off", quiet=True)  # the terminal belongs to the display
        begun = wandb.init(**arguments(run), dir=run.folder, settings=settings)
        return ServiceTracker(begun, table=wandb.Table)


class SwanLab(TrackerKind):
    package = "swanlab"

    @override
    def begin(self, run: TrackedRun) -> Tracker:
        import swanlab

        return ServiceTracker(swanlab.init(**arguments(run), log_dir=str(run.folder / "swanlab")))


class TensorBoard(TrackerKind):
    package = "tensorboard"

    @override
    def begin(self, run: TrackedRun) -> Tracker:
        return EventFiles(run)


class EventFiles:
    """TensorBoard's event files, below `tensorboard/` in the output directory."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        if run.life > 1:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=run.step + 1, session_log=start))

    def log(self, figures: Mapping[str, float], step: int, wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def finish(self) -> None:
        self._writer.close()


class MLflow(TrackerKind):
    package = "mlflow"
    takes_samples = True

    @override
    def begin(self, run: TrackedRun) -> Tracker:
        return MLflowRun(run)


class MLflowRun:
    """A run in the MLflow store that MLFLOW_TRACKING_URI names, or in MLflow's default store."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else self._client.create_experiment(run.project)
        made = self._client.create_run(experiment, run_name=run.name, tags={"group": run.group})
        self._id = made.info.run_id
        self._client.log_dict(self._id, json.loads(json.dumps(run.config, default=str)), "config.json")

    def log(self, figures: Mapping[str, float], step: int, wall_time: float) -> None:
        from mlflow.entities import Metric

        at = int(wall_time * 1000)
        self._client.log_batch(self._id, metrics=[Metric(*each, at, step) for each in figures.items()])

    def log_samples(self, rows: Sequence[TrackedSample], step: int) -> None:
        columns = dict(zip(SAMPLE_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        self._client.log_table(self._id, columns, "samples.json")  # it adds to that of earlier steps

    def finish(self) -> None:
        self._client.set_terminated(self._id)
