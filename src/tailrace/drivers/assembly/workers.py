"""The workers of a run: engines, trainer, reward workers, judges and reference, each a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tailrace.config import RunConfig
from tailrace.contracts.engine import COUNTS_FOLDER, Engine, EngineProcess, TokenCounter
from tailrace.contracts.trainer import LoraSettings, Reference, Trainer
from tailrace.devices import DeviceMap, Devices
from tailrace.drivers.assembly.environments import calls_reward_functions
from tailrace.drivers.assembly.placement import device_map, trainer_cpus_reserved
from tailrace.drivers.data.encoding import Tokenizer
from tailrace.drivers.data.settings import longest_sequence
from tailrace.drivers.engine.proof import probe_ids
from tailrace.drivers.engine.settings import NativeEngineSettings, TinkerEngineSettings
from tailrace.drivers.engine.stops import Decoder
from tailrace.drivers.engine.supervised import SupervisedEngine, watch_engines
from tailrace.drivers.reward.kinds import Judge, judge_kind
from tailrace.drivers.workers.calls import Job, RemoteWorker, Spawner, Worker
from tailrace.drivers.workers.engine import EngineJob, EngineWorker, RemoteEngine
from tailrace.drivers.workers.hosts import host_kind
from tailrace.drivers.workers.reference import ReferenceJob, ReferenceWorker, RemoteReference
from tailrace.drivers.workers.reward import RewardPool
from tailrace.drivers.workers.reward_process import RewardJob, RewardWorker
from tailrace.drivers.workers.trainer import (
    AdapterOff,
    RemoteTrainer,
    TrainerJob,
    TrainerWorker,
    trainer_jobs,
)
from tailrace.errors import EnginesLost, NotArrived, WorkerDied, first_cause
from tailrace.extras.http.servers import HttpEngines
from tailrace.model_folder import context_length, read_config


@dataclass(frozen=True, slots=True)
class Workers:
    """The worker processes of a run, ready for requests."""

    engines: tuple[Engine, ...]
    trainer: Trainer
    rewards: RewardPool | None
    """Workers of reward functions; None: no function is called."""
    judges: tuple[Judge, ...]
    reference: Reference | None
    """The reference model; None: the algorithm needs none."""


@asynccontextmanager
async def open_workers(
    config: RunConfig, folder: Path, tokenizer: Tokenizer, *, life: int | None = None
) -> AsyncIterator[Workers]:
    """Start all workers of a checked config concurrently, and end them with the block, however it ends.

    An engine that dies is restarted. The block is cancelled if another worker dies, or if no engine comes
    back. To train again from the start with the same workers: first `trainer.save`; later `trainer.restore`,
    publish, and load with kv="recompute".

    Args:
        folder: folder of the run; the workers' output goes to its `logs/`.
        life: number of the run's life; the tokens of each engine are then counted in `counts/`.

    Raises:
        ConfigError: a worker cannot do its job.
        WorkerDied: a worker ended; with its name, the exit cause and the end of its log.
        EnginesLost: all engines were dead for `engine.recovery_timeout_s`.
        NotArrived: an engine did not get a publication after a restart either.
    """
    devices = device_map(config)
    opened = host_kind(config.host).open(config, folder)
    begun = _at_service if isinstance(config.engine, TinkerEngineSettings) else _started
    with trainer_cpus_reserved(devices):
        async with opened as spawner, begun(config, folder, tokenizer, life, devices, spawner) as workers:
            yield workers


StartWorker = Callable[..., Awaitable[RemoteWorker]]
"""Starts a worker: its kind, name, job and devices."""


def _starter(config: RunConfig, spawner: Spawner, started: list[RemoteWorker]) -> StartWorker:
    """Return what starts workers, which it adds to a list."""

    async def start(kind: type[Worker], name: str, job: Job, devices: Devices | None = None) -> RemoteWorker:
        job = job.model_copy(update={"health_timeout_s": config.host.health_timeout_s})
        started.append(worker := await spawner.start(name, kind, job, devices))
        return worker

    return start


async def _rewards(
    config: RunConfig, tokenizer: Tokenizer, start: StartWorker, closing: list[Callable[[], Awaitable[None]]]
) -> tuple[RewardPool | None, tuple[Judge, ...]]:
    """Start the reward workers, if reward functions are called, and the judges."""
    reward, pool = host_kind(config.host).rewards_there(config.reward), None
    if calls_reward_functions(config):
        assert config.data
        job = RewardJob(reward=reward, data=config.data)
        scorers = [await start(RewardWorker, f"scorer-{i}", job) for i in range(reward.workers)]
        pool = RewardPool(scorers, tokenizer, reward)
    judges = [await judge_kind(each).begin(each, start, reward.timeout_s) for each in reward.judges]
    closing += [judge.close for judge in judges]
    return pool, tuple(judges)


def _decode(tokenizer: Tokenizer) -> Decoder:
    return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)


def _counter(folder: Path, name: str, life: int | None) -> TokenCounter:
    return TokenCounter(folder / COUNTS_FOLDER / f"{name}-{life}.count" if life else None)


@asynccontextmanager
async def _at_service(
    config: RunConfig,
    folder: Path,
    tokenizer: Tokenizer,
    life: int | None,
    devices: DeviceMap,
    spawner: Spawner,
) -> AsyncIterator[Workers]:
    """Trainer and engine at a service with Tinker's API; rewards here."""
    from tailrace.extras.tinker.client import TinkerEngine, TinkerSession, TinkerTrainer

    engine = config.engine
    assert config.sampling and isinstance(engine, TinkerEngineSettings)
    started: list[RemoteWorker] = []
    service = await TinkerSession.open(engine, (config.trainer.lora or LoraSettings()).rank)
    closing: list[Callable[[], Awaitable[None]]] = [service.close]
    try:
        async with ended_by_death((), service.keep()):
            rewards, judges = await _rewards(config, tokenizer, _starter(config, spawner, started), closing)
            trainer = TinkerTrainer(service, config.trainer, config.algorithm, config.sampling)
            await _all_done(trainer.open(), *(worker.ready() for worker in started))
            counter = _counter(folder, "engine-0", life)
            served = TinkerEngine(service, engine, config.sampling, counter, _decode(tokenizer))
            async with ended_by_death(started):
                yield Workers((served,), trainer, rewards, judges, None)
    finally:
        await asyncio.gather(*(worker.close() for worker in started), *(close() for close in closing))


@asynccontextmanager
async def _started(
    config: RunConfig,
    folder: Path,
    tokenizer: Tokenizer,
    life: int | None,
    devices: DeviceMap,
    spawner: Spawner,
) -> AsyncIterator[Workers]:
    assert config.model and config.sampling
    model, data, engine, sampling = config.model.path, config.data, config.engine, config.sampling
    trainer, algorithm = config.trainer, config.algorithm
    started: list[RemoteWorker] = []
    start = _starter(config, spawner, started)

    def supervised(number: int, devices: Devices | None) -> SupervisedEngine:
        name = f"engine-{number}"

        async def begin() -> EngineProcess:
            if not isinstance(engine, NativeEngineSettings):
                return await http_engines.begin(name, number, supervised_engine.width)
            job = EngineJob(
                threads=engine.threads,
                health_timeout_s=engine.health_timeout_s,
                model=model,
                engine=engine,
                sampling=sampling,
                adapter=trainer.adapter,
            )
            remote = RemoteEngine(await spawner.start(name, EngineWorker, job, devices), job)
            remote.send = remote_trainer.send
            return remote

        counter = _counter(folder, name, life)
        supervised_engine = SupervisedEngine(name, engine.max_num_seqs, begin, counter, config.num_versions)
        return supervised_engine

    context = context_length(model)
    probed = config.weights.probe_every > 0
    probe = probe_ids(engine.kind, read_config(model)["vocab_size"], context) if probed else ()
    trainer_job = TrainerJob(
        threads=trainer.threads,
        model=model,
        trainer=trainer,
        algorithm=algorithm,
        sampling=sampling,
        weights=config.weights.in_run_folder(folder),
        published_dtype="float32" if trainer.adapter else engine.dtype,
        checkpoints=folder.absolute() if life is not None else None,
        probe=probe,
        probe_dtype=engine.dtype,
        seed=config.run.seed,
    )
    reference_job = ReferenceJob(
        threads=trainer.threads, model=model, trainer=trainer, temperature=sampling.temperature
    )
    engines = [supervised(number, each) for number, each in enumerate(devices.engines)]
    closing: list[Callable[[], Awaitable[None]]] = [each.close for each in engines]
    try:
        rewards, judges = await _rewards(config, tokenizer, start, closing)
        ranks = zip(trainer_jobs(trainer_job), devices.trainer, strict=True)
        processes = [await start(TrainerWorker, name, job, each) for (name, job), each in ranks]
        remote_trainer = RemoteTrainer(processes, trainer_job)
        closing.append(remote_trainer.close)
        if not isinstance(engine, NativeEngineSettings):
            assert data and not isinstance(engine, TinkerEngineSettings)
            fills_context, room = config.environment.has_turns, len(probe) + 1
            longest = partial(longest_sequence, data, sampling, max_context_tokens=context)
            http_engines = HttpEngines(
                model,
                engine,
                sampling,
                spawner=spawner,
                devices=devices.engines,
                min_context=longest(unbounded_prompt=1),
                max_context=context if fills_context else max(longest(unbounded_prompt=context), room),
                decode=_decode(tokenizer),
                trainer=remote_trainer,
                trainer_settings=trainer,
            )
        reference: Reference | None = None
        if algorithm.needs_reference and trainer.lora:
            reference = AdapterOff(remote_trainer)
        elif algorithm.needs_reference:
            reference = RemoteReference(await start(ReferenceWorker, "reference", reference_job))
        if config.placement.kind != "disaggregated":
            await remote_trainer.ready()
            await remote_trainer.sleep()  # a server takes the memory that it finds free
        await _all_done(*(each.open() for each in engines), *(worker.ready() for worker in started))
        watched = watch_engines(engines, engine.recovery_timeout_s)
        async with ended_by_death(started, watched):
            yield Workers(tuple(engines), remote_trainer, rewards, judges, reference)
    finally:
        await asyncio.gather(*(worker.close() for worker in started), *(close() for close in closing))


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
    processes: Iterable[RemoteWorker], watched: Coroutine[Any, Any, None] | None = None
) -> AsyncIterator[None]:
    """Cancel the block when a process ends, or when the watch over the engines gives up.

    Raises:
        WorkerDied: of that process.
        EnginesLost, NotArrived: of the watch.
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
        error = first_cause(group.subgroup((WorkerDied, EnginesLost, NotArrived)) or group)
        raise error from error.__cause__
