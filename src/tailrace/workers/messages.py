"""Everything that crosses between the controller and its workers, as closed unions.

A job says what a worker does. It is part of the command line with which the worker starts. All else is a
message. A worker answers in the order in which it was asked; a `Report` comes unasked.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from tailrace import errors
from tailrace.algo.base import AlgorithmSettings
from tailrace.data.base import DataSettings
from tailrace.engine.base import GenerationOutput, GenerationRequest, Usage
from tailrace.engine.settings import NativeEngineSettings, SamplingSettings
from tailrace.errors import ConfigError, TailraceError
from tailrace.reward.base import RewardSettings
from tailrace.settings import Settings
from tailrace.trainer.base import LoraSettings, StepStats, TrainerSettings
from tailrace.trainer.batch import TrainingSample
from tailrace.types import KV
from tailrace.weights.base import DTYPE, Link, ProcessGroupSettings, Weights, WeightsSettings

_Plain = str | int | float | None


class Job(Settings):
    """What a worker does."""

    threads: int = 1
    """Threads that torch and BLAS libraries use."""
    health_timeout_s: float | None = None
    """Seconds that the worker may be stopped; None: as long as its owner waits."""

    def folders(self) -> Mapping[str, Path]:
        """Return the folders that the worker's host must have, by the key of the config that names each."""
        return {}

    def at(self, address: str) -> Self:
        """Return the job for a worker on another host.

        Args:
            address: under which the other hosts reach that host.
        """
        return self


class EngineJob(Job):
    """Serve a model."""

    model: Path
    engine: NativeEngineSettings
    sampling: SamplingSettings
    report_every_s: float = 0.5
    """Seconds between reports of unfinished requests. Finished requests are reported at once."""
    adapter: LoraSettings | None = None
    """New weights come as adapters of these settings. None: they come whole."""

    def folders(self) -> Mapping[str, Path]:
        """As Job.folders."""
        return {"model.path": self.model}


class TrainerJob(Job):
    """Train a model."""

    model: Path
    trainer: TrainerSettings
    algorithm: AlgorithmSettings
    sampling: SamplingSettings
    weights: WeightsSettings
    published_dtype: DTYPE
    """The type of the engines' weights."""
    seed: int = 0
    """Of its random generators."""
    replica: int = 0
    rank: int = 0
    """Of this process among those of its replica."""
    host: str = "127.0.0.1"
    """The address of its host under which the other processes of the trainer reach it."""

    @property
    def is_alone(self) -> bool:
        """Whether the process has no need of torch.distributed."""
        return self.trainer.ranks * self.trainer.replicas == 1 and not self.trainer.cpu_offload

    @property
    def listens(self) -> bool:
        """Whether the other processes find one another through this one."""
        return self.replica == self.rank == 0

    def folders(self) -> Mapping[str, Path]:
        """As Job.folders."""
        return {"model.path": self.model}

    def at(self, address: str) -> Self:
        """As Job.at. A process group whose host is left at its default listens on that address."""
        weights = self.weights
        if isinstance(weights, ProcessGroupSettings) and "host" not in weights.model_fields_set:
            weights = weights.model_copy(update={"host": address})
        return self.model_copy(update={"weights": weights, "host": address})


class ReferenceJob(Job):
    """Compute log-probs of samples under a frozen model."""

    model: Path
    trainer: TrainerSettings
    """It uses the trainer's packing, device and precision."""
    temperature: float
    """Sampling temperature."""

    def folders(self) -> Mapping[str, Path]:
        """As Job.folders."""
        return {"model.path": self.model}


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
    """The reverse, with the weights of the model folder. An Alive follows each file that was read. Answered
    by Done, or by Refused if there is no memory."""


class Report(msgspec.Struct, tag=True):
    """What the engine generated since its last report."""

    outputs: list[GenerationOutput]
    aborted: list[str]
    usage: Usage


ToEngine = GenerationRequest | Abort | Load | Pause | Resume | Ping | Sleep | Wake
FromEngine = Ready | Refused | Report | Done | Alive


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


class Release(msgspec.Struct, tag=True):
    """Give memory that is not in use back to the device. Answered by Done."""


class Save(msgspec.Struct, tag=True):
    """Begin a checkpoint. Answered by Done when training may go on, or by Refused. A Written follows Done;
    it comes before Done if the trainer does not train on while it writes."""

    folder: str


class Written(msgspec.Struct, tag=True):
    """The checkpoint of the last Save is complete, or has failed."""

    failure: str | None
    """Of CheckpointError."""


class Restore(msgspec.Struct, tag=True):
    """Continue from a checkpoint. Answered by Done or Refused."""

    folder: str


class Listening(msgspec.Struct, tag=True):
    """The other processes of the trainer find one another at this address. Unasked, before Ready."""

    host: str
    port: int


class Join(msgspec.Struct, tag=True):
    """The address of a Listening. Not answered."""

    host: str
    port: int


class Stranded(msgspec.Struct, tag=True):
    """A collective of the trainer's processes failed: another one has ended, or did not take part in time.
    The process does nothing more. Unasked."""

    error: str


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
    without_adapter: bool = False
    """Under the model that LoRA began with."""


class Referred(msgspec.Struct, tag=True):
    logprobs: list[float]
    """[num_tokens]"""


ToTrainer = Join | Accumulate | Ess | Refer | Step | Publish | Send | Release | Save | Restore
FromTrainer = (
    Ready | Refused | Listening | Stranded | EssOf | Referred | Done | Stepped | Published | Sent | Written
)


FromReference = Ready | Refused | Referred
