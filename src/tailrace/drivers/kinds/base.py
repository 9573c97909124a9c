"""The knowledge of a kind of engine or trainer: its checks, its memory, and how it is opened.

Opening has two phases: `begin` starts processes, and `open` or `ready` waits for them.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tailrace.config import PolicyConfig, RunConfig
from tailrace.contracts.engine import COUNTS_FOLDER, Engine, EngineProcess, TokenCounter
from tailrace.contracts.memory import ProcessMemory
from tailrace.contracts.trainer import LoraSettings, Reference, Trainer
from tailrace.devices import DeviceMap, Devices
from tailrace.drivers.data.encoding import Tokenizer
from tailrace.drivers.engine.probes import probe_ids
from tailrace.drivers.engine.settings import ReplicaSettings
from tailrace.drivers.engine.stops import Decoder
from tailrace.drivers.engine.supervised import SupervisedEngine, watch_engines
from tailrace.drivers.workers.calls import RemoteWorker, Spawner
from tailrace.drivers.workers.worker import Job, Worker
from tailrace.errors import ConfigError
from tailrace.kinds import kind_of
from tailrace.model_folder import context_length, read_config

BeginProcess = Callable[[str, int, int], Awaitable[EngineProcess]]
"""Begins a process of an engine: of this name, of this number, and over the devices of so many engines."""


@dataclass(slots=True)
class Opening:
    """The common arguments of all openings of a run.

    Args:
        config: checked.
        folder: of the run.
        life: number of the run's life; None: engines count their tokens in memory only.
        spawner: starts processes that may be started again.
        devices: of each process.
    """

    config: PolicyConfig
    folder: Path
    life: int | None
    tokenizer: Tokenizer
    spawner: Spawner
    devices: DeviceMap
    started: list[RemoteWorker] = field(default_factory=list)
    """Processes whose death ends the run. It waits until they are ready, and closes them."""
    closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called when the run ends."""
    watches: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    """Run beside it, and end it by raising."""

    @property
    def decode(self) -> Decoder:
        """The function that gives the text of tokens, special ones included."""
        return partial(self.tokenizer.backend_tokenizer.decode, skip_special_tokens=False)

    @property
    def probe(self) -> tuple[int, ...]:
        """The sequence by which engines prove that they have a publication; empty: there is none."""
        if not self.config.weights.probe_every:
            return ()
        vocabulary = read_config(self.config.model.path)["vocab_size"]
        return probe_ids(engine_kind(self.config).prefix, vocabulary, context_length(self.config.model.path))

    async def start(
        self, kind: type[Worker], name: str, job: Job, devices: Devices | None = None, *, watched: bool = True
    ) -> RemoteWorker:
        """Start a worker. `watched`: its death ends the run."""
        job = job.model_copy(update={"health_timeout_s": self.config.host.health_timeout_s})
        worker = await self.spawner.start(name, kind, job, devices)
        self.started += [worker] if watched else []
        self.closing += [] if watched else [worker.close]
        return worker

    def watching(self) -> list[Coroutine[Any, Any, None]]:
        """Return the watches that were added since the last call."""
        added, self.watches = self.watches, []
        return [watch() for watch in added]

    def counter(self, name: str) -> TokenCounter:
        """Return what counts the tokens of an engine."""
        return TokenCounter(self.folder / COUNTS_FOLDER / f"{name}-{self.life}.count" if self.life else None)


class StartingEngine(Engine, Protocol):
    """An engine that has begun."""

    async def open(self) -> None:
        """Wait until it is ready. Raises TailraceError if it cannot start."""


class StartingTrainer(Trainer, Protocol):
    """A trainer that has begun."""

    async def ready(self) -> None:
        """Wait until it is ready. Raises TailraceError if it cannot start."""


class EngineKind:
    """A kind of engine, whose processes are started again when they die."""

    settings: type[ReplicaSettings]
    settle_s = 0.0
    """Seconds after which `usage` is up to date."""
    prefix: int | None = None
    """Tokens of a probe before those that are scored; None: such an engine answers no probe."""
    verifies = False
    """Whether its engines draw tokens again with the same noise (`Capabilities.verifies`)."""

    def check(self, config: PolicyConfig) -> None:
        """Check the settings against the other sections before anything starts. Raises a ConfigError."""

    def check_adapter(self, lora: LoraSettings, config: PolicyConfig) -> None:
        """Check that it takes published adapters. Raises a ConfigError."""
        problem = f"engines of the kind {config.engine.kind!r} take whole weights only"
        raise ConfigError("trainer.lora.publish", lora.publish, problem, 'write "merged"')

    def check_installed(self, settings: Any) -> None:
        """Check that this machine has the programs of its processes. Raises a ConfigError."""

    def memory(self, config: PolicyConfig, longest: int, adapters: int) -> Iterable[ProcessMemory]:
        """Estimate the memory of the processes on this machine.

        Args:
            longest: tokens of a prompt and its completion, at most.
            adapters: parameters of all LoRA adapters that an engine keeps.
        """
        return ()

    def processes(self, opening: Opening, trainer: Any) -> BeginProcess:
        """Return what begins a process of an engine. The trainer may still be starting."""
        raise NotImplementedError

    def begin(self, opening: Opening, trainer: Any) -> Sequence[StartingEngine]:
        """Begin the engines of a run."""
        config, begin = opening.config, self.processes(opening, trainer)

        def supervised(number: int) -> SupervisedEngine:
            name, slots, versions = f"engine-{number}", config.engine.max_num_seqs, config.num_versions

            def start() -> Awaitable[EngineProcess]:
                return begin(name, number, engine.width)

            engine = SupervisedEngine(name, slots, start, opening.counter(name), versions)
            return engine

        engines = [supervised(number) for number in range(config.engine.num_engines)]
        opening.closing += [each.close for each in engines]
        opening.watches.append(partial(watch_engines, engines, config.engine.recovery_timeout_s))
        return engines


class TrainerKind:
    """A kind of trainer."""

    is_local = True
    """Whether the run chooses its threads, types and sizes from a machine."""

    def check(self, config: PolicyConfig) -> None:
        """Check the settings against the other sections before anything starts. Raises a ConfigError."""

    def memory(self, config: PolicyConfig, longest: int) -> Iterable[ProcessMemory]:
        """Estimate the memory of the processes on this machine. `longest`: as in `EngineKind.memory`."""
        return ()

    def checkpoint_bytes(self, config: PolicyConfig) -> tuple[int, int]:
        """Estimate the size of the model in a checkpoint, and that of the state of the optimizer."""
        return 0, 0

    async def begin(self, opening: Opening) -> StartingTrainer:
        """Begin the trainer of a run."""
        raise NotImplementedError

    async def reference(self, opening: Opening, trainer: Any) -> Reference | None:
        """Begin the reference model. None: the algorithm needs none."""
        return None


def engine_kind(config: RunConfig) -> EngineKind:
    """Return the kind of the engines. Raises as `kind_of`."""
    kind: EngineKind = kind_of("engine", config.engine.kind)
    return kind


def trainer_kind(config: RunConfig) -> TrainerKind:
    """Return the kind of the trainer. Raises as `kind_of`."""
    kind: TrainerKind = kind_of("trainer", config.trainer.kind)
    return kind
