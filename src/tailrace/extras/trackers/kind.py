"""The trackers. A package is imported when a run begins in it.

Each life of a run is a run of its own in trackio, W&B, MLflow and SwanLab, in one group. TensorBoard drops
the steps that a resumed run makes again.
"""

import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from typing_extensions import override

from tailrace.drivers.kinds.tracker import TrackedRun, Tracker, TrackerKind


class ServiceTracker:
    """A run in trackio, W&B or SwanLab, whose interfaces are alike."""

    def __init__(self, run: Any, *left_out: str) -> None:
        self._run, self._left_out = run, left_out

    def log(self, figures: Mapping[str, float], step: int, wall_time: float) -> None:
        self._run.log({key: figures[key] for key in figures if key not in self._left_out}, step=step)

    def finish(self) -> None:
        with redirect_stdout(StringIO()):
            self._run.finish()


def arguments(run: TrackedRun) -> dict[str, Any]:
    """Return the arguments that the `init` of these three have in common."""
    return {"project": run.project, "name": run.name, "group": run.group, "config": dict(run.config)}


class Trackio(TrackerKind):
    package = "trackio"

    @override
    def begin(self, run: TrackedRun) -> Tracker:
        import trackio

        with redirect_stdout(StringIO()):  # its banner
            begun = trackio.init(**arguments(run), embed=False)
        return ServiceTracker(begun, "time")  # it has a `time` of its own


class Wandb(TrackerKind):
    package = "wandb"

    @override
    def begin(self, run: TrackedRun) -> Tracker:
        import wandb

        settings = wandb.Settings(console="off", quiet=True)  # the terminal belongs to the display
        return ServiceTracker(wandb.init(**arguments(run), dir=run.folder, settings=settings))


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

    def finish(self) -> None:
        self._client.set_terminated(self._id)
