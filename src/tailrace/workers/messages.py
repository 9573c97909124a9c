"""Everything that crosses between the controller and its workers, as closed unions.

A job says what a worker is; it is part of the command line the worker starts with. All else is a
message. A worker answers in the order it was asked; a `Report` comes unasked.
"""

from pathlib import Path
from typing import Literal

import msgspec

from tailrace.algo.base import AlgorithmSettings
from tailrace.data.base import DataSettings
from tailrace.engine.base import (
    EngineSettings,
    GenerationOutput,
    GenerationRequest,
    SamplingSettings,
    Usage,
)
from tailrace.errors import CheckpointError, ConfigError, ScheduleError, TailraceError
from tailrace.reward.base import Call, RewardSettings
from tailrace.settings import Settings
from tailrace.trainer.base import StepStats, TrainerSettings
from tailrace.trainer.batch import TrainingSample
from tailrace.types import KV
from tailrace.weights.base import Weights

_Plain = str | int | float | None


class EngineJob(Settings):
    """Serve a model."""

    model: Path
    engine: EngineSettings
    sampling: SamplingSettings
    count: Path | None = None
    """The file of the engine's token count (counter.py)."""
    report_every_s: float = 0.5
    """Seconds between reports of unfinished requests. Finished requests are reported at once."""


class TrainerJob(Settings):
    """Train a model."""

    model: Path
    trainer: TrainerSettings
    algorithm: AlgorithmSettings
    sampling: SamplingSettings


class ReferenceJob(Settings):
    """Compute log-probs of samples under a frozen model."""

    model: Path
    trainer: TrainerSettings
    """It uses the trainer's packing, device and precision."""
    temperature: float
    """Sampling temperature."""


class ScorerJob(Settings):
    """Call a reward function."""

    reward: RewardSettings
    data: DataSettings


class Ready(msgspec.Struct, tag=True):
    """The worker has loaded what its job names."""


class BadConfig(msgspec.Struct, tag=True):
    """The job cannot be done; the worker ends."""

    key: str
    value: _Plain
    problem: str
    remedy: str

    @classmethod
    def of(cls, error: ConfigError) -> "BadConfig":
        value = error.value if isinstance(error.value, _Plain) else str(error.value)
        return cls(error.key, value, error.problem, error.remedy)

    def error(self) -> TailraceError:
        return ConfigError(self.key, self.value, self.problem, self.remedy)


class Done(msgspec.Struct, tag=True):
    """What was asked is done."""


# -- engine -----------------------------------------------------------------------------------------


class Abort(msgspec.Struct, tag=True):
    """End a request now. Answered by its id in a Report, after its last output."""

    id: str


class Load(msgspec.Struct, tag=True):
    """Take new weights. Answered by Done."""

    weights: Weights
    kv: KV


class Report(msgspec.Struct, tag=True):
    """What the engine generated since its last report."""

    outputs: list[GenerationOutput]
    aborted: list[str]
    usage: Usage


ToEngine = GenerationRequest | Abort | Load
FromEngine = Ready | BadConfig | Report | Done


# -- trainer ----------------------------------------------------------------------------------------


class TrainerReady(msgspec.Struct, tag=True):
    """The trainer has loaded its model."""

    shared: str
    """The folder of published weights."""


class Accumulate(msgspec.Struct, tag=True):
    """Add the gradients of units to their sum. Answered by Done."""

    units: list[list[TrainingSample]]


class Ess(msgspec.Struct, tag=True):
    """Compute the effective sample size of units under the current weights. Answered by EssOf."""

    units: list[list[TrainingSample]]


class EssOf(msgspec.Struct, tag=True):
    """The answer to Ess."""

    share: float


class Step(msgspec.Struct, tag=True):
    """Do one optimizer step. Answered by Stepped."""


class Publish(msgspec.Struct, tag=True):
    """Publish the current weights. Answered by Published."""

    version: int


class Save(msgspec.Struct, tag=True):
    """Write a checkpoint. Answered by Done or Refused."""

    folder: str


class Restore(msgspec.Struct, tag=True):
    """Continue from a checkpoint. Answered by Done or Refused."""

    folder: str


class Stepped(msgspec.Struct, tag=True):
    """The answer to Step."""

    stats: StepStats


class Published(msgspec.Struct, tag=True):
    """The answer to Publish."""

    weights: Weights


class Refused(msgspec.Struct, tag=True):
    """The trainer could not execute a message. Its state is unchanged."""

    kind: Literal["CheckpointError", "ScheduleError"]
    message: str

    @classmethod
    def of(cls, error: CheckpointError | ScheduleError) -> "Refused":
        return cls("CheckpointError" if isinstance(error, CheckpointError) else "ScheduleError", str(error))

    def error(self) -> TailraceError:
        return (CheckpointError if self.kind == "CheckpointError" else ScheduleError)(self.message)


ToTrainer = Accumulate | Ess | Step | Publish | Save | Restore
FromTrainer = TrainerReady | BadConfig | EssOf | Done | Stepped | Published | Refused


# -- reference ---------------------------------------------------------------------------------------


class Refer(msgspec.Struct, tag=True):
    """Compute log-probs of samples. Answered by Referred."""

    samples: list[TrainingSample]


class Referred(msgspec.Struct, tag=True):
    """The answer to Refer."""

    logprobs: list[list[float]]
    """[num_tokens] of each sample of Refer, in its order."""


FromReference = Ready | BadConfig | Referred


# -- scorer -----------------------------------------------------------------------------------------


class Score(msgspec.Struct, tag=True):
    """Make one call of the reward function. Answered by Scored of the same number, or by Serving where the
    call ended its process."""

    number: int
    call: Call


class Serving(msgspec.Struct, tag=True):
    """A process is ready for calls."""

    pid: int
    """The process, and the process group that it leads."""
    ended: str
    """How the process before it ended; empty for the first one."""


class Failed(msgspec.Struct, array_like=True):
    """A RewardFailed, as data."""

    reason: str
    detail: str
    is_defect: bool = False


class Scored(msgspec.Struct, tag=True):
    """The outcome of a call."""

    number: int
    outcome: float | Failed


ToScorer = Score
FromScorer = Serving | BadConfig | Scored
