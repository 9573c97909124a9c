"""The trainer as a group of processes: one answer, one error, and the process to blame when one is lost."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from safetensors.torch import load_file

from helpers.worker_cases import until_gone
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import StepStats, TrainerSettings
from tailrace.drivers.assembly.open import ended_by_death
from tailrace.drivers.weights.settings import SharedMemorySettings
from tailrace.drivers.workers import trainer as module
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.trainer import RemoteTrainer, Stranded, TrainerJob, TrainerWorker, trainer_jobs
from tailrace.errors import CheckpointError, ConfigError, ScheduleError, WorkerDied
from tailrace.types import Group, Prompt, Sample, SampleId


def unit(prompt: int, num_tokens: int, token: int = 7) -> list[Sample]:
    """Two samples of one prompt, with advantages."""
    group = Group(Prompt(prompt, [3, 4, 5]), 2, [])
    for number in range(2):
        sample = Sample(SampleId(prompt, 0, number), group, seed=0, advantage=1.0 - 2 * number)
        sample.extend([token] * num_tokens, [-1.0] * num_tokens, version=0)
        group.samples.append(sample)
    return group.samples


@asynccontextmanager
async def started(model: Path, logs: Path, **settings: object) -> AsyncIterator[RemoteTrainer]:
    job = TrainerJob(
        model=model,
        trainer=TrainerSettings.model_validate({"min_tokens_per_microbatch": 1, **settings}),
        algorithm=AlgorithmSettings(),
        sampling=SamplingSettings(max_completion_tokens=40),
        weights=SharedMemorySettings(),
        published_dtype="float32",
    )
    spawner = LocalSpawner(logs)
    processes = [await spawner.start(name, TrainerWorker, each) for name, each in trainer_jobs(job)]
    trainer = RemoteTrainer(processes, job)
    try:
        await trainer.ready()
        async with ended_by_death(processes):
            yield trainer
    finally:
        await trainer.close()


async def test_the_use_of_gpus_is_the_largest_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = ({"memory": 1.5, "utilization": 0.9}, {"memory": 3.0})
    answers = [StepStats(1, (), 7, compute_s=2.0, gpu=each) for each in gpu]
    monkeypatch.setattr(module, "_begin", AsyncMock(return_value=answers))
    trainer = RemoteTrainer.__new__(RemoteTrainer)
    trainer._given, trainer._replicas, trainer.workers = [0], [[Mock(), Mock()]], [Mock(), Mock()]
    assert (await trainer.step()).gpu == {"memory": 3.0, "utilization": 0.9}


async def test_a_rank_may_lose_its_peers_in_training_and_in_a_checkpoint_at_once() -> None:
    job = TrainerJob.model_construct(trainer=TrainerSettings(ranks=2), weights=SharedMemorySettings())
    ranks = [RemoteWorker(name, TrainerWorker, job) for name in ("trainer-0-0", "trainer-0-1")]
    trainer = RemoteTrainer(ranks, job)
    for where in ("a checkpoint", "a step"):
        ranks[0].on_event(Stranded(where))
    assert trainer._stranded == {ranks[0]: "a checkpoint"}


async def test_a_rank_that_lost_its_peers_blames_none_of_those_that_replace_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blame comes some time after the loss, and new processes may have begun by then."""
    monkeypatch.setattr(module, "BLAME_S", 0.0)
    blamed: list[RemoteWorker] = []
    monkeypatch.setattr(RemoteWorker, "abort", lambda worker, why: blamed.append(worker))
    job = TrainerJob.model_construct(trainer=TrainerSettings(ranks=2), weights=SharedMemorySettings())
    lost, others = ([RemoteWorker(f"trainer-0-{n}", TrainerWorker, job) for n in (0, 1)] for _ in range(2))
    trainer = RemoteTrainer(lost, job)
    lost[0].on_event(Stranded("a step"))
    trainer._adopt(others)
    await asyncio.sleep(0.01)
    assert not {*blamed} & {*others}


async def test_ranks_answer_as_one_and_the_one_that_hangs_is_named_with_its_stack(
    model_path: Path, tmp_path: Path
) -> None:
    missing = r"trainer-0-1 did not take part in a collective within 12 s \(trainer\.collective_timeout_s\); "
    with pytest.raises(WorkerDied, match=missing) as died:
        async with started(model_path, tmp_path, ranks=2, collective_timeout_s=12) as trainer:
            with pytest.raises(ScheduleError, match="nothing was accumulated"):
                await trainer.step()
            with pytest.raises(CheckpointError, match="nowhere"):
                await trainer.restore(tmp_path / "nowhere")
            await trainer.accumulate([unit(0, 5), unit(1, 9)], version=0)
            stats = await trainer.step()
            assert [str(id) for id in stats.samples] == ["0.0/0", "0.0/1", "1.0/0", "1.0/1"]
            assert stats.num_tokens == 28
            weights = await trainer.publish(1)
            names = set(load_file(model_path / "model.safetensors"))
            assert set(load_file(Path(weights.location) / "model.safetensors")) == names
            written = await trainer.save(tmp_path / "checkpoint")
            await trainer.accumulate([unit(0, 5)], version=1)
            await trainer.step()
            await written
            (tmp_path / "file").write_text("where a checkpoint is to be")
            with pytest.raises(CheckpointError, match=r"file cannot be written .* make room on the disk"):
                await (await trainer.save(tmp_path / "file"))
            assert set(load_file(tmp_path / "checkpoint" / "model.safetensors")) == names
            assert len(list((tmp_path / "checkpoint" / "trainer").iterdir())) == 2
            pids = [each.process.pid for each in trainer.workers]
            os.kill(pids[1], signal.SIGSTOP)
            await trainer.accumulate([unit(2, 5)], version=1)
            raise AssertionError("the stopped rank has answered")
    assert "drivers/workers/trainer.py" in str(died.value), "the stack of the stopped rank"
    await until_gone(*pids)


async def test_early_replicas_share_the_samples_of_a_unit_and_the_others_sleep(
    model_path: Path, tmp_path: Path
) -> None:
    async with started(model_path, tmp_path, replicas=3) as trainer:
        await trainer.sleep()
        await trainer.wake(2)
        await trainer.accumulate([unit(0, 6)], version=0, replicas=2)
        with pytest.raises(ScheduleError, match="accumulate: the trainer is asleep"):
            await trainer.accumulate([unit(1, 9), unit(2, 8), unit(3, 7)], version=0)
        await trainer.wake()
        stats = await trainer.step()
        assert [str(id) for id in stats.samples][:2] == ["0.0/0", "1.0/0"]


async def test_a_trainer_without_room_for_its_state_names_the_setting(
    model_path: Path, tmp_path: Path
) -> None:
    async with started(model_path, tmp_path, offload={"weights": "disk"}) as trainer:
        (worker,) = trainer.workers
        resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(ConfigError, match=r"trainer\.offload = .*'weights': 'disk'.*set TMPDIR"):
            await trainer.sleep()


async def test_replicas_share_units_and_one_that_raises_is_named_with_its_traceback(
    model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkerDied, match=r"trainer-1-0 \(process \d+\) ended: exit code 1") as died:
        async with started(model_path, tmp_path, replicas=2) as trainer:
            await trainer.accumulate([unit(0, 2), unit(1, 9), unit(2, 5)], version=0)
            await trainer.accumulate([unit(3, 4)], version=0, replicas=1)
            await trainer.sleep()
            with pytest.raises(ScheduleError, match="step: the trainer is asleep"):
                await trainer.step()
            await trainer.wake()  # the gradients stay
            stats = await trainer.step()
            prompts = [id.prompt for id in stats.samples]
            assert prompts == [1, 1, 3, 3, 0, 0, 2, 2], "the longest unit first, to the emptiest replica"
            bad = unit(5, 4, token=10**6)
            shared = trainer.accumulate([unit(4, 4), bad], version=0)
            await asyncio.gather(shared, trainer.step())
    assert "IndexError" in str(died.value)
