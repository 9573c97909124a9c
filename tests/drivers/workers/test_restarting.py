"""A trainer that starts again, and an engine that loads what it has published."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.worker_cases import TRAINER, make_samples, process_of, workers
from tailrace.contracts.engine import Arrival
from tailrace.contracts.weights import Weights
from tailrace.drivers.engine.supervised import SupervisedEngine
from tailrace.drivers.weights.settings import FilesystemSettings, SharedMemorySettings, WeightsSettings
from tailrace.drivers.workers.restarting import RestartingTrainer
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import TransferFailed
from tailrace.types import Sample


@asynccontextmanager
async def restarting(
    model: Path, folder: Path, weights: WeightsSettings
) -> AsyncIterator[tuple[RestartingTrainer, SupervisedEngine, list[Arrival]]]:
    """A trainer that may start again three times, an engine, and what that proved of its weights."""
    arrivals: list[Arrival] = []
    settings = TRAINER.model_copy(update={"restarts": 3})
    async with workers(model, folder, trainer=settings, weights=weights) as opened:
        trainer, (engine,) = opened.trainer, opened.engines
        assert isinstance(trainer, RestartingTrainer)
        engine.on_arrival = arrivals.append
        yield trainer, engine, arrivals


async def step(trainer: RestartingTrainer, version: int) -> Weights:
    """Train a sample, and publish the weights."""
    await trainer.accumulate([[trained()]], version=version - 1)
    await trainer.step()
    return await trainer.publish(version)


def trained() -> Sample:
    (sample,) = make_samples(1)
    sample.extend([8, 9, 10], [-3.0, -3.0, -3.0], 0)
    sample.advantage = 1.0
    return sample


def kill(trainer: RestartingTrainer) -> int:
    os.kill(pid := trainer.workers[0].process.pid, signal.SIGKILL)
    return pid


async def proven(engine: SupervisedEngine, arrivals: list[Arrival], weights: Weights) -> tuple[int, str]:
    """Load weights. Returns the version whose tensors the engine has, and what is wrong with it."""
    arrivals.clear()
    await engine.load(weights, kv="recompute")
    assert engine.state == "open"
    return arrivals[-1].version, arrivals[-1].cause


@pytest.mark.parametrize("kind", [SharedMemorySettings, FilesystemSettings])
async def test_a_version_that_was_published_before_the_checkpoint_is_there_after_each_death_of_the_trainer(
    model_path: Path, tmp_path: Path, kind: type[Any]
) -> None:
    async with restarting(model_path, tmp_path, kind()) as (trainer, *engine):
        weights = await step(trainer, 1)
        await (await trainer.save(tmp_path / "checkpoint"))
        for _ in range(2):
            kill(trainer)
            await trainer.ess([[trained()]], version=1)  # by the new process
            assert await proven(*engine, weights) == (1, "")
        newer = await step(trainer, 2)
        kill(trainer)
        assert await proven(*engine, newer) == (2, ""), "the step was made again"


async def test_a_load_waits_for_a_process_that_has_published_also_if_one_dies_before_it_does(
    model_path: Path, tmp_path: Path
) -> None:
    async with restarting(model_path, tmp_path, SharedMemorySettings()) as (trainer, *engine):
        weights = await step(trainer, 1)
        await (await trainer.save(tmp_path / "checkpoint"))
        (call,), killed = trainer._calls, list[int]()
        publish = call.make

        async def die_once() -> Weights:
            killed.extend([] if killed else [kill(trainer)])
            return await publish()

        call.make = die_once
        kill(trainer)
        await trainer.workers[0].exit_reason()
        assert await proven(*engine, weights) == (1, "")
        assert len(killed) == 1 and not Path(weights.location).exists()


async def test_a_call_that_is_cancelled_while_the_trainer_starts_again_leaves_it_with_all_calls(
    model_path: Path, tmp_path: Path
) -> None:
    async with restarting(model_path, tmp_path, SharedMemorySettings()) as (trainer, *_):
        initial = await RemoteTrainer.logprobs(trainer, trained())
        await step(trainer, 1)
        expected, dead = await RemoteTrainer.logprobs(trainer, trained()), trainer.workers[0]
        kill(trainer)
        await dead.exit_reason()
        call = asyncio.create_task(trainer.ess([[trained()]], version=1))
        while trainer.workers[0] is dead:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        call.cancel()
        await trainer.ess([[trained()]], version=1)
        assert await RemoteTrainer.logprobs(trainer, trained()) == expected != initial


async def test_an_engine_whose_trainer_dies_during_the_load_gets_the_version_from_the_next_one(
    model_path: Path, tmp_path: Path
) -> None:
    async with restarting(model_path, tmp_path, SharedMemorySettings()) as (trainer, engine, arrivals):
        weights, pid = await step(trainer, 1), process_of(engine).pid
        os.kill(pid, signal.SIGSTOP)
        loading = asyncio.create_task(proven(engine, arrivals, weights))
        await asyncio.sleep(0.1)
        kill(trainer)
        await trainer.ess([[trained()]], version=1)
        os.kill(pid, signal.SIGCONT)
        assert await loading == (1, "")
        assert process_of(engine).pid == pid


async def test_a_version_that_the_trainer_does_not_keep_is_refused_by_name(
    model_path: Path, tmp_path: Path
) -> None:
    async with restarting(model_path, tmp_path, SharedMemorySettings()) as (trainer, engine, arrivals):
        oldest, _, newest = [await step(trainer, version) for version in (1, 2, 3)]
        with pytest.raises(TransferFailed, match=r"the trainer has versions \[2, 3\] .* not 1"):
            await engine._process.load(oldest, kv="keep")
        assert await proven(engine, arrivals, newest) == (3, "")
