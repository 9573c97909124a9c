"""Weights from a trainer's process to engines' processes, by each transport that can leave the host."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.engine_contract import fresh_samples
from helpers.tiny_models import save_tiny_model
from helpers.worker_cases import start_engine
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.contracts.weights import Link, Weights
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.weights.settings import (
    FilesystemSettings,
    ProcessGroupSettings,
    SharedMemorySettings,
    WeightsSettings,
)
from tailrace.drivers.weights.transfers import Transfers
from tailrace.drivers.workers.engine import EngineJob, RemoteEngine
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.trainer import RemoteTrainer, TrainerJob, TrainerWorker
from tailrace.errors import EngineDied, TransferFailed, WeightsRefused, WorkerDied
from tailrace.types import Sample

SAMPLING = SamplingSettings(max_completion_tokens=300)
NUM_TOKENS = 300
ENGINE = NativeEngineSettings()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What the engines start with, and what the trainer has."""
    served, trained = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("trained")
    save_tiny_model(served)
    save_tiny_model(trained, seed=1)
    return served, trained


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> list[list[int]]:
    """The completions of `fresh_samples(4)` by the trainer's model."""
    engine = NativeEngine(models[1], ENGINE, SAMPLING)
    for sample in fresh_samples(4):
        engine.submit(GenerationRequest(str(sample.id), sample.prompt.ids, [], sample.seed))
    ended: dict[str, list[int]] = {}
    while not engine.idle:
        ended |= {output.id: output.ids for output in engine.step()}
    return [ended[str(sample.id)] for sample in fresh_samples(4)]


@asynccontextmanager
async def started(
    models: tuple[Path, Path], weights: WeightsSettings, logs: Path, num_engines: int, seed: int = 0
) -> AsyncIterator[tuple[RemoteTrainer, list[RemoteEngine]]]:
    served, trained = models
    job = TrainerJob(
        model=trained,
        trainer=TrainerSettings(),
        algorithm=AlgorithmSettings(),
        sampling=SAMPLING,
        weights=weights,
        published_dtype="float32",
        seed=seed,
    )
    trainer = RemoteTrainer([await LocalSpawner(logs).start("trainer", TrainerWorker, job)], job)
    engine_job = EngineJob(model=served, engine=ENGINE, sampling=SAMPLING, report_every_s=0.0)
    engines = [await start_engine(f"engine-{n}", engine_job, logs) for n in range(num_engines)]
    for engine in engines:
        engine.transfers = trainer.transfers
    try:
        await asyncio.gather(trainer.ready(), *(engine.ready() for engine in engines))
        yield trainer, engines
    finally:
        await asyncio.gather(trainer.close(), *(engine.close() for engine in engines))


async def test_a_publication_without_room_is_an_error_with_its_remedy_and_the_trainer_lives(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = FilesystemSettings(folder=tmp_path / "weights")
    for settings, remedy in ((SharedMemorySettings(), "--shm-size"), (folder, "must fit there")):
        async with started(models, settings, tmp_path, 0) as (trainer, _):
            pid = trainer.workers[0].process.pid
            limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            with pytest.raises(TransferFailed, match=remedy):
                await trainer.publish(1)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
            assert (await trainer.publish(2)).version == 2


async def completions(engine: RemoteEngine, num: int = 4) -> list[list[int]]:
    samples = fresh_samples(num)
    await asyncio.gather(*(engine.generate(sample) for sample in samples))
    return [sample.completion_ids for sample in samples]


async def under_way(samples: Sequence[Sample]) -> None:
    while not all(sample.num_tokens for sample in samples):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def check_requests_under_way_go_on(
    trainer: RemoteTrainer, engines: list[RemoteEngine], expected: list[list[int]]
) -> None:
    """They take the trainer's weights; with a recomputed KV cache the completions are those of its model."""
    weights = await trainer.publish(1)
    assert (weights.version, weights.changed) == (1, 0.0)
    groups = [fresh_samples(4), fresh_samples(4)]
    generation = asyncio.gather(
        *(engine.generate(s) for engine, group in zip(engines, groups, strict=True) for s in group)
    )
    await under_way([*groups[0], *groups[1]])
    await asyncio.gather(*(engine.load(weights, kv="keep") for engine in engines))
    await generation
    for sample in [*groups[0], *groups[1]]:
        assert sample.num_tokens == NUM_TOKENS
        assert [span.version for span in sample.spans] == [0, 1]
    for _ in range(2):
        await asyncio.gather(*(engine.load(weights, kv="recompute") for engine in engines))
    assert [await completions(engine) for engine in engines] == [expected] * 2


async def test_requests_under_way_go_on_with_the_trainers_weights_from_a_folder(
    models: tuple[Path, Path], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = FilesystemSettings(folder=tmp_path / "weights")
    async with started(models, settings, tmp_path, 2) as (trainer, engines):
        await check_requests_under_way_go_on(trainer, engines, expected)


async def test_a_streamed_transfer_that_fails_leaves_the_old_weights_and_the_next_one_succeeds(
    models: tuple[Path, Path], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = ProcessGroupSettings(bucket_bytes=10_000, message_timeout_s=3.0)
    async with started(models, settings, tmp_path, 2) as (trainer, engines):
        dying, engine = engines
        old = await completions(engine)
        weights = await trainer.publish(1)
        first, *others = weights.tensors
        misshapen = replace(weights, tensors=(first._replace(shape=(1, *first.shape)), *others))
        with pytest.raises(WeightsRefused, match=f"1 of another shape: {first.name}"):
            await engine.load(misshapen, kv="keep")

        failed = asyncio.get_running_loop().create_future()

        async def send(weights: Weights, link: Link) -> None:
            try:
                await trainer.send(weights, link)
            except TransferFailed as error:
                failed.set_result(str(error))
                raise

        engine.transfers = Transfers(send)
        os.kill(engine.worker.process.pid, signal.SIGSTOP)
        loading = asyncio.create_task(engine.load(weights, kv="keep"))
        assert "engine-1 did not take version 1" in await failed
        engine.transfers = trainer.transfers
        os.kill(engine.worker.process.pid, signal.SIGCONT)
        with pytest.raises(TransferFailed, match="version 1"):
            await loading
        assert await completions(engine) == old

        await check_requests_under_way_go_on(trainer, engines, expected)

        os.kill(dying.worker.process.pid, signal.SIGSTOP)
        loading = asyncio.create_task(dying.load(weights, kv="keep"))
        await asyncio.sleep(0.1)
        os.kill(dying.worker.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="engine-0"):
            await loading
        await engine.load(weights, kv="recompute")
        assert await completions(engine) == expected


@asynccontextmanager
async def three_engines(
    models: tuple[Path, Path], logs: Path, timeout_s: float
) -> AsyncIterator[tuple[RemoteTrainer, list[RemoteEngine], list[Link]]]:
    """Engines, and the links over which the trainer was asked to send."""
    settings, asked = ProcessGroupSettings(bucket_bytes=10_000, message_timeout_s=timeout_s), list[Link]()
    async with started(models, settings, logs, 3) as (trainer, engines):

        async def send(weights: Weights, link: Link) -> None:
            asked.append(link)
            await trainer.send(weights, link)

        trainer.transfers = Transfers(send, trainer.give_up)
        for engine in engines:
            engine.transfers = trainer.transfers
        yield trainer, engines, asked


async def load_all(engines: Sequence[RemoteEngine], weights: Weights) -> list[BaseException | None]:
    loads = [engine.load(weights, kv="recompute") for engine in engines]
    return await asyncio.gather(*loads, return_exceptions=True)


NAMES = ("engine-0", "engine-1", "engine-2")


async def test_engines_that_load_at_the_same_time_get_one_transfer_over_a_link_that_stays(
    models: tuple[Path, Path], expected: list[list[int]], tmp_path: Path
) -> None:
    async with three_engines(models, tmp_path, 30.0) as (trainer, engines, asked):
        for version in (1, 2):
            weights = await trainer.publish(version)
            assert await load_all(engines, weights) == [None] * 3
        assert [await completions(engine) for engine in engines] == [expected] * 3
        assert [(link.engines, link.num_ranks) for link in asked] == [(NAMES, 3)] * 2
        assert asked[0] == asked[1]
        await engines[1].load(await trainer.publish(3), kv="keep")
        assert asked[2].engines == ("engine-1",)


@pytest.mark.parametrize("are_connected", [False, True], ids=["while they meet", "in mid-broadcast"])
async def test_an_engine_that_dies_in_a_shared_transfer_costs_itself(
    are_connected: bool, models: tuple[Path, Path], expected: list[list[int]], tmp_path: Path
) -> None:
    limit_s = 10.0 if are_connected else 60.0  # an engine that is connected is missed after it
    async with three_engines(models, tmp_path, limit_s) as (trainer, engines, asked):
        if are_connected:
            assert await load_all(engines, await trainer.publish(1)) == [None] * 3
        weights, pid = await trainer.publish(2), engines[1].worker.process.pid
        os.kill(pid, signal.SIGSTOP)
        loading = asyncio.create_task(load_all(engines, weights))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        first, died, last = await loading
        assert (first, last) == (None, None)
        assert isinstance(died, EngineDied)
        others = [engines[0], engines[2]]
        assert [await completions(engine) for engine in others] == [expected] * 2
        assert await load_all(others, await trainer.publish(3)) == [None] * 2
        assert asked[-1].engines == ("engine-0", "engine-2")


async def test_an_engine_that_does_not_come_gets_transfers_of_its_own_which_is_said_once(
    models: tuple[Path, Path],
    expected: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with three_engines(models, tmp_path, 4.0) as (trainer, engines, asked):
        weights, pid = await trainer.publish(1), engines[1].worker.process.pid
        os.kill(pid, signal.SIGSTOP)
        late = asyncio.create_task(engines[1].load(weights, kv="recompute"))
        assert await load_all([engines[0], engines[2]], weights) == [None] * 2
        os.kill(pid, signal.SIGCONT)
        await late
        assert await load_all(engines, await trainer.publish(2)) == [None] * 3
        assert sorted(link.engines for link in asked[-2:]) == [("engine-0", "engine-2"), ("engine-1",)]
        assert [await completions(engine) for engine in engines] == [expected] * 3
    said = [line for line in capsys.readouterr().err.splitlines() if "of its own" in line]
    assert len(said) == 1
    assert said[0].startswith("tailrace: warning: engine-1 gets transfers of its own: ")
    assert said[0].endswith("rank 1 did not come within 4 s (weights.message_timeout_s)")


async def test_engines_load_and_live_while_the_trainer_computes(
    models: tuple[Path, Path], expected: list[list[int]], tmp_path: Path
) -> None:
    """Training follows a publication at once. One engine loads then, another one later, as after a death."""
    async with started(models, ProcessGroupSettings(message_timeout_s=60.0), tmp_path, 2) as (
        trainer,
        engines,
    ):
        weights = await trainer.publish(1)
        unit = fresh_samples(3000)  # some 30 s of work
        for sample in unit:
            sample.extend(expected[0], [-1.0] * NUM_TOKENS, 0)
            sample.advantage = 1.0
        training = asyncio.create_task(trainer.accumulate([unit], version=1))
        await asyncio.sleep(0)  # the message is under way
        for engine in engines:
            await engine.load(weights, kv="recompute")
            assert await completions(engine) == expected
        assert not training.done()
        trainer.workers[0].kill()
        with pytest.raises(WorkerDied):
            await training


async def test_two_trainers_of_one_seed_draw_the_same_and_one_of_another_does_not(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    async def random_state(name: str, seed: int) -> bytes:
        async with started(models, SharedMemorySettings(), tmp_path, 0, seed=seed) as (trainer, _):
            await (await trainer.save(tmp_path / name))
        (file,) = (tmp_path / name / "trainer").glob("*.safetensors")
        return bytes(load_file(file)["random.cpu.0"].tolist())

    one, other = await random_state("one", 3), await random_state("other", 3)
    assert one == other != await random_state("third", 4)
