"""Workers on this host: engines, trainer, reward workers and reference, each a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tailrace.algo.base import AlgorithmSettings
from tailrace.data.base import DataSettings
from tailrace.data.tokenizer import Tokenizer
from tailrace.engine.base import EngineSettings, SamplingSettings
from tailrace.errors import WorkerDied, first_cause
from tailrace.reward.base import RewardSettings
from tailrace.trainer.base import TrainerSettings
from tailrace.workers.counter import COUNTS_FOLDER
from tailrace.workers.engine import RemoteEngine
from tailrace.workers.messages import EngineJob, Job, ReferenceJob, ScorerJob, TrainerJob
from tailrace.workers.process import RemoteWorker, WorkerProcess
from tailrace.workers.reference import RemoteReference
from tailrace.workers.reward import RemoteScorer, RewardPool
from tailrace.workers.trainer import RemoteTrainer


@dataclass(frozen=True, slots=True)
class Workers:
    """The worker processes of a run, ready for requests."""

    engines: tuple[RemoteEngine, ...]
    trainer: RemoteTrainer
    rewards: RewardPool
    reference: RemoteReference | None
    """None where the algorithm needs no reference model."""


W = TypeVar("W", bound=RemoteWorker[Any])


@asynccontextmanager
async def open_local(
    model: Path,
    *,
    engine: EngineSettings,
    sampling: SamplingSettings,
    algorithm: AlgorithmSettings,
    trainer: TrainerSettings,
    reward: RewardSettings,
    data: DataSettings,
    tokenizer: Tokenizer,
    folder: Path,
    life: int | None = None,
    pins: Sequence[int] = (),
) -> AsyncIterator[Workers]:
    """Start all workers concurrently, and end them with the block, however the block ends.

    If a worker dies, the block is cancelled. To train again from the start with the same workers: first
    `trainer.save`; later `trainer.restore`, publish, and load with kv="recompute".

    Args:
        model: a Hugging Face folder, for engines and trainer.
        folder: folder of the run; the workers' output goes to its `logs/`.
        life: number of the run's life; the engines then keep their token counts in `counts/`.
        pins: a CPU for each engine, then one for the trainer; empty: any.

    Raises:
        ConfigError: a worker cannot do its job.
        WorkerDied: a worker ended; with its name, the exit cause and the end of its log.
    """
    cpus: list[int | None] = [*pins] or [None] * (engine.replicas + 1)
    started: list[RemoteWorker[Any]] = []

    async def start(kind: type[W], name: str, job: Job, pin: int | None = None) -> W:
        worker = await kind.spawn(name, job, logs=folder / "logs", pin=pin)
        started.append(worker)
        return worker

    async def start_engine(name: str, pin: int | None) -> RemoteEngine:
        count = folder / COUNTS_FOLDER / f"{name}-{life}.count" if life else None
        job = EngineJob(threads=engine.threads, model=model, engine=engine, sampling=sampling, count=count)
        return await start(RemoteEngine, name, job, pin)

    trainer_job = TrainerJob(
        threads=trainer.threads, model=model, trainer=trainer, algorithm=algorithm, sampling=sampling
    )
    reference_job = ReferenceJob(
        threads=trainer.threads, model=model, trainer=trainer, temperature=sampling.temperature
    )
    scorer_job = ScorerJob(reward=reward, data=data)
    try:
        engines = [await start_engine(f"engine-{i}", pin) for i, pin in enumerate(cpus[:-1])]
        remote_trainer = await start(RemoteTrainer, "trainer", trainer_job, cpus[-1])
        scorers = [await start(RemoteScorer, f"scorer-{i}", scorer_job) for i in range(reward.workers)]
        reference = None
        if algorithm.needs_reference:
            reference = await start(RemoteReference, "reference", reference_job)
        await asyncio.gather(*(worker.ready() for worker in started))
        async with ended_by_death([worker.process for worker in started]):
            rewards = RewardPool(scorers, tokenizer, reward)
            yield Workers(tuple(engines), remote_trainer, rewards, reference)
    finally:
        await asyncio.gather(*(worker.close() for worker in started))


@asynccontextmanager
async def ended_by_death(processes: Iterable[WorkerProcess]) -> AsyncIterator[None]:
    """Cancel the block when a process ends.

    Raises:
        WorkerDied: of that process.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(process.died()) for process in processes]
            try:
                yield
            finally:
                for watcher in watchers:
                    watcher.cancel()
    except BaseExceptionGroup as group:
        deaths = group.subgroup(WorkerDied)
        error = first_cause(deaths) if deaths else group.exceptions[0]
        raise error from error.__cause__
