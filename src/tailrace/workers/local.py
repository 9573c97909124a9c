"""Workers on this host: engines, trainer, reward workers and reference, each a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tailrace.algo.base import AlgorithmSettings
from tailrace.data.base import DataSettings, longest_sequence
from tailrace.data.encoding import Tokenizer
from tailrace.devices import DeviceMap, Devices
from tailrace.engine.base import COUNTS_FOLDER, EngineLife, TokenCounter
from tailrace.engine.settings import EngineSettings, NativeEngineSettings, SamplingSettings
from tailrace.engine.supervised import SupervisedEngine, watch_engines
from tailrace.errors import EnginesLost, WorkerDied, first_cause
from tailrace.model_folder import context_length
from tailrace.reward.base import RewardSettings
from tailrace.trainer.base import Reference, TrainerSettings
from tailrace.weights.base import WeightsSettings, in_run_folder
from tailrace.workers.base import BrokerSettings
from tailrace.workers.conversation import Conversation
from tailrace.workers.engine import RemoteEngine
from tailrace.workers.http_engines import HttpEngines
from tailrace.workers.judge import RemoteJudge
from tailrace.workers.judge_messages import judge_jobs
from tailrace.workers.messages import EngineJob, Job, ReferenceJob, ScorerJob, TrainerJob
from tailrace.workers.reference import RemoteReference
from tailrace.workers.remote import RemoteWorker
from tailrace.workers.reward import RemoteScorer, RewardPool
from tailrace.workers.spawner import LocalSpawner, Spawner
from tailrace.workers.trainer import AdapterOff, RemoteTrainer, TrainerProcess, processes_of


@dataclass(frozen=True, slots=True)
class Workers:
    """The worker processes of a run, ready for requests."""

    engines: tuple[SupervisedEngine, ...]
    trainer: RemoteTrainer
    rewards: RewardPool | None
    """None where no reward function is called."""
    judges: tuple[RemoteJudge, ...]
    reference: Reference | None
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
    weights: WeightsSettings,
    reward: RewardSettings,
    data: DataSettings,
    tokenizer: Tokenizer,
    seed: int = 0,
    folder: Path,
    scores: bool = True,
    broker: BrokerSettings | None = None,
    life: int | None = None,
    devices: DeviceMap | None = None,
    spawner: Spawner | None = None,
    fills_context: bool = False,
    health_timeout_s: float | None = None,
) -> AsyncIterator[Workers]:
    """Start all workers concurrently, and end them with the block, however the block ends.

    An engine that dies is restarted. The block is cancelled if another worker dies, or if no engine comes
    back. To train again from the start with the same workers: first
    `trainer.save`; later `trainer.restore`, publish, and load with kv="recompute".

    Args:
        model: a Hugging Face folder, for engines and trainer.
        seed: of the trainer's random generators.
        folder: folder of the run; the workers' output goes to its `logs/`.
        scores: whether reward functions are called; an environment may give the rewards.
        broker: joins workers of other hosts; None: all run on this host.
        life: number of the run's life; the tokens of each engine are then counted in `counts/`.
        devices: of each engine and rank of the trainer; None: any.
        spawner: starts the workers; None: on this host.
        fills_context: the environment goes on until a sample fills the model's context.
        health_timeout_s: of the workers that are no engines (host.health_timeout_s).

    Raises:
        ConfigError: a worker cannot do its job.
        WorkerDied: a worker ended; with its name, the exit cause and the end of its log.
        EnginesLost: all engines were dead for `engine.give_up_s`.
    """
    devices = devices or DeviceMap((None,) * engine.num_engines, (None,) * trainer.ranks * trainer.replicas)
    spawner = spawner or LocalSpawner(folder / "logs")
    started: list[RemoteWorker[Any]] = []
    broker = broker or BrokerSettings()

    async def start(kind: type[W], name: str, job: Job, devices: Devices | None = None) -> W:
        job = job.model_copy(update={"health_timeout_s": health_timeout_s})
        if broker.url and name in broker.joined:
            worker = await kind.join(name, job, broker, run=folder.name)
        else:
            worker = await kind.spawn(name, job, spawner, devices)
        started.append(worker)
        return worker

    def supervised(number: int, devices: Devices | None) -> SupervisedEngine:
        name = f"engine-{number}"
        count = folder / COUNTS_FOLDER / f"{name}-{life}.count" if life else None

        async def begin() -> EngineLife:
            if not isinstance(engine, NativeEngineSettings):
                return await http_engines.begin(name, number, supervised_engine.width)
            job = EngineJob(
                threads=engine.threads, model=model, engine=engine, sampling=sampling, adapter=trainer.adapter
            )
            process = await RemoteEngine.spawn(name, job, spawner, devices)
            process.send = remote_trainer.send
            return process

        supervised_engine = SupervisedEngine(name, engine.max_num_seqs, begin, TokenCounter(count))
        return supervised_engine

    trainer_job = TrainerJob(
        threads=trainer.threads,
        model=model,
        trainer=trainer,
        algorithm=algorithm,
        sampling=sampling,
        weights=in_run_folder(weights, folder),
        published_dtype="float32" if trainer.adapter else engine.dtype,
        seed=seed,
    )
    reference_job = ReferenceJob(
        threads=trainer.threads, model=model, trainer=trainer, temperature=sampling.temperature
    )
    scorer_job = ScorerJob(reward=reward, data=data)
    engines = [supervised(number, each) for number, each in enumerate(devices.engines)]
    try:
        # They come first: the others wait until torch is imported.
        num_scorers = reward.workers if scores and reward.calls_functions else 0
        scorers = [await start(RemoteScorer, f"scorer-{i}", scorer_job) for i in range(num_scorers)]
        ranks = zip(processes_of(trainer_job), devices.trainer, strict=True)
        processes = [await start(TrainerProcess, name, job, each) for (name, job), each in ranks]
        remote_trainer = RemoteTrainer(processes)
        if not isinstance(engine, NativeEngineSettings):
            context = context_length(model)
            longest = partial(
                longest_sequence,
                data,
                max_completion_tokens=sampling.max_completion_tokens,
                max_context_tokens=context,
            )
            http_engines = HttpEngines(
                model,
                engine,
                sampling,
                spawner=spawner,
                devices=devices.engines,
                min_context=longest(unbounded_prompt=1),
                max_context=context if fills_context else longest(unbounded_prompt=context),
                trainer=remote_trainer,
                trainer_settings=trainer,
            )
        judges = [await start(RemoteJudge, f"judge-{each.judge.name}", each) for each in judge_jobs(reward)]
        reference: Reference | None = None
        if algorithm.needs_reference and trainer.lora:
            reference = AdapterOff(remote_trainer)
        elif algorithm.needs_reference:
            reference = await start(RemoteReference, "reference", reference_job)
        await _all_done(*(each.open() for each in engines), *(worker.ready() for worker in started))
        watched = watch_engines(engines, engine.give_up_s)
        async with ended_by_death([worker.process for worker in started], watched):
            rewards = RewardPool(scorers, tokenizer, reward) if scorers else None
            yield Workers(tuple(engines), remote_trainer, rewards, tuple(judges), reference)
    finally:
        await asyncio.gather(*(worker.close() for worker in started), *(each.close() for each in engines))


async def _all_done(*starts: Coroutine[Any, Any, None]) -> None:
    """Wait for all. If one fails, the others are cancelled, and an engine that is about to start is ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for start in starts:
                tasks.create_task(start)
    except BaseExceptionGroup as group:
        raise first_cause(group) from None


@asynccontextmanager
async def ended_by_death(
    processes: Iterable[Conversation], watched: Coroutine[Any, Any, None] | None = None
) -> AsyncIterator[None]:
    """Cancel the block when a process ends, or when the watch over the engines gives up.

    Raises:
        WorkerDied: of that process.
        EnginesLost: of the watch.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(process.died()) for process in processes]
            watchers += [tasks.create_task(watched)] if watched else []
            try:
                yield
            finally:
                for watcher in watchers:
                    watcher.cancel()
    except BaseExceptionGroup as group:
        error = first_cause(group.subgroup((WorkerDied, EnginesLost)) or group)
        raise error from error.__cause__
