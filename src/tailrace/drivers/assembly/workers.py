"""The workers of a run: engines, trainer, reward workers, judges and reference, each a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.config import LiveConfig, PolicyConfig
from tailrace.contracts.engine import Engine
from tailrace.contracts.trainer import Reference, Trainer
from tailrace.devices import DeviceMap
from tailrace.drivers.assembly.environments import calls_reward_functions
from tailrace.drivers.assembly.placement import device_map, trainer_cpus_reserved
from tailrace.drivers.data.encoding import Tokenizer
from tailrace.drivers.kinds.base import Opening, engine_kind, trainer_kind
from tailrace.drivers.kinds.teacher import begin_teachers
from tailrace.drivers.reward.kinds import Judge, judge_kind
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.hosts import host_kind
from tailrace.drivers.workers.reward import RewardPool
from tailrace.drivers.workers.reward_process import RewardJob, RewardWorker
from tailrace.errors import EnginesLost, NotArrived, WorkerDied, first_cause


@dataclass(frozen=True, slots=True)
class Workers:
    """The worker processes of a run, ready for requests."""

    engines: tuple[Engine, ...]
    trainer: Trainer
    rewards: RewardPool | None
    """Workers of reward functions; None: no function is called."""
    judges: tuple[Judge, ...]
    reference: Reference | None
    """The reference model, or the teachers; None: the algorithm needs none."""


@asynccontextmanager
async def open_workers(
    config: PolicyConfig, folder: Path, tokenizer: Tokenizer, *, life: int | None = None
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
    engines_of, trainer_of = engine_kind(config), trainer_kind(config)
    with trainer_cpus_reserved(devices):
        async with _opening(config, folder, tokenizer, devices, life) as opening:
            rewards, judges = await _rewards(opening)
            trainer = await trainer_of.begin(opening)
            async with ended_by_death((), *opening.watching()):
                engines = engines_of.begin(opening, trainer)
                if config.teacher:
                    reference: Reference | None = await begin_teachers(opening)
                else:
                    reference = await trainer_of.reference(opening, trainer)
                if config.placement.takes_turns:
                    await trainer.ready()
                    await trainer.sleep()  # a server takes the memory that it finds free
                workers = [worker.ready() for worker in opening.started]
                await _all_done(trainer.ready(), *(each.open() for each in engines), *workers)
                async with ended_by_death(opening.started, *opening.watching()):
                    yield Workers(tuple(engines), trainer, rewards, judges, reference)


@asynccontextmanager
async def open_trainer(config: PolicyConfig, folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Trainer]:
    """Start the trainer of a checked config alone, and end it with the block. Raises as `open_workers`."""
    async with _opening(config, folder, tokenizer, device_map(config)) as opening:
        trainer = await trainer_kind(config).begin(opening)
        await _all_done(trainer.ready(), *(worker.ready() for worker in opening.started))
        async with ended_by_death(opening.started, *opening.watching()):
            yield trainer


@asynccontextmanager
async def open_reward_workers(
    config: PolicyConfig, folder: Path, tokenizer: Tokenizer
) -> AsyncIterator[tuple[RewardPool | None, tuple[Judge, ...]]]:
    """Start the reward workers and the judges alone, as `open_workers`."""
    async with _opening(config, folder, tokenizer, DeviceMap((), ())) as opening:
        scorers = await _rewards(opening)
        await _all_done(*(worker.ready() for worker in opening.started))
        async with ended_by_death(opening.started):
            yield scorers


@asynccontextmanager
async def _opening(
    config: PolicyConfig, folder: Path, tokenizer: Tokenizer, devices: DeviceMap, life: int | None = None
) -> AsyncIterator[Opening]:
    """Open the host of workers of a run, and close them with the block."""
    async with host_kind(config.host).open(config, folder) as spawner:
        opening = Opening(config, folder, life, tokenizer, spawner, devices)
        try:
            yield opening
        finally:
            closing = [*(worker.close for worker in opening.started), *opening.closing]
            await asyncio.gather(*(close() for close in closing))


async def _rewards(opening: Opening) -> tuple[RewardPool | None, tuple[Judge, ...]]:
    """Start the reward workers, if reward functions are called, and the judges."""
    config = opening.config
    reward, pool = host_kind(config.host).rewards_there(config.reward), None
    if calls_reward_functions(config):
        job = RewardJob(reward=reward, data=LiveConfig.of(config).data)
        scorers = [await opening.start(RewardWorker, f"scorer-{i}", job) for i in range(reward.workers)]
        pool = RewardPool(scorers, opening.tokenizer, reward)
    judges = [await judge_kind(each).begin(each, opening.start, reward.timeout_s) for each in reward.judges]
    opening.closing += [judge.close for judge in judges]
    return pool, tuple(judges)


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
    processes: Iterable[RemoteWorker], *watches: Coroutine[Any, Any, None]
) -> AsyncIterator[None]:
    """Cancel the block when a process ends, or when a watch gives up.

    Raises:
        WorkerDied: of that process.
        EnginesLost, NotArrived: of a watch.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(each.died()) for each in processes]
            watchers += map(tasks.create_task, watches)
            try:
                yield
            finally:
                for watcher in watchers:
                    watcher.cancel()
    except BaseExceptionGroup as group:
        error = first_cause(group.subgroup((WorkerDied, EnginesLost, NotArrived)) or group)
        raise error from error.__cause__
