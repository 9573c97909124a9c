"""Everything that crosses between the controller and its workers, as closed unions.

A job says what a worker does. It is part of the command line with which the worker starts. All else is a
message. A worker answers in the order in which it was asked; a `Report` comes unasked.
"""

from pathlib import Path

import msgspec

from tailrace import errors
from tailrace.algo.base import AlgorithmSettings
from tailrace.data.base import DataSettings
from tailrace.engine.base import GenerationOutput, GenerationRequest, Usage
from tailrace.engine.settings import NativeEngineSettings, SamplingSettings
from tailrace.errors import ConfigError, TailraceError
from tailrace.reward.base import Call, RewardSettings, Scores
from tailrace.settings import Settings
from tailrace.trainer.base import StepStats, TrainerSettings
from tailrace.trainer.batch import TrainingSample
from tailrace.types import KV
from tailrace.weights.base import DTYPE, Link, Weights, WeightsSettings

_Plain = str | int | float | None


class Job(Settings):
    """What a worker does."""

    threads: int = 1
    """Threads that torch and BLAS libraries use."""


class EngineJob(Job):
    """Serve a model."""

    model: Path
    engine: NativeEngineSettings
    sampling: SamplingSettings
    report_every_s: float = 0.5
    """Seconds between reports of unfinished requests. Finished requests are reported at once."""


class ServerJob(Job):
    """Run an inference server."""

    command: tuple[str, ...]
    env: dict[str, str] = {}
    """Environment variables beside those of the controller."""


class TrainerJob(Job):
    """Train a model."""

    model: Path
    trainer: TrainerSettings
    algorithm: AlgorithmSettings
    sampling: SamplingSettings
    weights: WeightsSettings
    published_dtype: DTYPE
    """The type of the engines' weights."""


class ReferenceJob(Job):
    """Compute log-probs of samples under a frozen model."""

    model: Path
    trainer: TrainerSettings
    """It uses the trainer's packing, device and precision."""
    temperature: float
    """Sampling temperature."""


class ScorerJob(Job):
    """Call a reward function."""

    reward: RewardSettings
    data: DataSettings


class Ready(msgspec.Struct, tag=True):
    """The worker has loaded what its job names."""


class Refused(msgspec.Struct, tag=True):
    """An error of errors.py, as data. A worker that cannot do its job ends. After any other error its state
    is unchanged."""

    kind: str
    arguments: list[_Plain]

    @classmethod
    def of(cls, error: TailraceError) -> "Refused":
        parts = (
            [error.key, error.value, error.problem, error.remedy]
            if isinstance(error, ConfigError)
            else error.args
        )
        return cls(type(error).__name__, [part if isinstance(part, _Plain) else str(part) for part in parts])

    def error(self) -> TailraceError:
        error: TailraceError = getattr(errors, self.kind)(*self.arguments)
        return error


class Done(msgspec.Struct, tag=True):
    """What was asked is done."""


class Abort(msgspec.Struct, tag=True):
    """End a request now. Answered by its id in a Report, after its last output."""

    id: str


class Load(msgspec.Struct, tag=True):
    """Take new weights. Answered by Done, or by Refused: the old weights stay."""

    weights: Weights
    link: Link
    kv: KV


class Pause(msgspec.Struct, tag=True):
    """Generate nothing until Resume; loads and aborts still happen. Answered by Done, after a Report of all
    tokens."""


class Resume(msgspec.Struct, tag=True):
    """Generate again. Answered by Done."""


class Ping(msgspec.Struct, tag=True):
    """Answered by Alive between two decode steps."""


class Alive(msgspec.Struct, tag=True):
    """The engine's loop runs."""


class Sleep(msgspec.Struct, tag=True):
    """Free the memory of weights and KV cache. Nothing runs. Answered by Done."""


class Wake(msgspec.Struct, tag=True):
    """The reverse, with the weights of the model folder. Answered by Done."""


class Report(msgspec.Struct, tag=True):
    """What the engine generated since its last report."""

    outputs: list[GenerationOutput]
    aborted: list[str]
    usage: Usage


ToEngine = GenerationRequest | Abort | Load | Pause | Resume | Ping | Sleep | Wake
FromEngine = Ready | Refused | Report | Done | Alive

FromServer = Ready
"""Nothing, in fact: it answers over HTTP."""


class Accumulate(msgspec.Struct, tag=True):
    """Add the gradients of units to their sum. Answered by Done."""

    units: list[list[TrainingSample]]


class Ess(msgspec.Struct, tag=True):
    """Compute the effective sample size of units under the current weights. Answered by EssOf."""

    units: list[list[TrainingSample]]


class EssOf(msgspec.Struct, tag=True):
    share: float


class Step(msgspec.Struct, tag=True):
    """Do one optimizer step. Answered by Stepped."""


class Publish(msgspec.Struct, tag=True):
    """Publish the current weights. Answered by Published."""

    version: int


class Send(msgspec.Struct, tag=True):
    """Send a version to an engine, beside other work. Answered by Sent of the same number, at any time."""

    number: int
    version: int
    link: Link


class Save(msgspec.Struct, tag=True):
    """Write a checkpoint. Answered by Done or Refused."""

    folder: str


class Restore(msgspec.Struct, tag=True):
    """Continue from a checkpoint. Answered by Done or Refused."""

    folder: str


class Stepped(msgspec.Struct, tag=True):
    stats: StepStats


class Published(msgspec.Struct, tag=True):
    weights: Weights


class Sent(msgspec.Struct, tag=True):
    """The outcome of a Send."""

    number: int
    failure: str | None
    """Of TransferFailed."""


class Refer(msgspec.Struct, tag=True):
    """Compute the log-probs of a sample. Answered by Referred."""

    sample: TrainingSample


class Referred(msgspec.Struct, tag=True):
    logprobs: list[float]
    """[num_tokens]"""


ToTrainer = Accumulate | Ess | Refer | Step | Publish | Send | Save | Restore
FromTrainer = Ready | Refused | EssOf | Referred | Done | Stepped | Published | Sent


FromReference = Ready | Refused | Referred


class Score(msgspec.Struct, tag=True):
    """Make one call of the reward function. Answered by Scored of the same number, or by Serving where the
    call ended its process."""

    number: int
    call: Call


class Serving(msgspec.Struct, tag=True):
    """A new process is ready for calls."""

    pid: int
    """The process, and the process group that it leads."""
    ended: str
    """How the process before it ended; empty for the first one."""


class Failed(msgspec.Struct, array_like=True, tag=True):
    """A RewardFailed, as data."""

    reason: str
    detail: str
    is_defect: bool = False


class Scored(msgspec.Struct, tag=True):
    """The outcome of a call."""

    number: int
    outcome: Scores | Failed


FromScorer = Ready | Refused | Serving | Scored
