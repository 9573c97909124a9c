"""The reference model in its own process."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from helpers.worker_cases import make_samples, workers
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.reference import ReferenceJob, ReferenceWorker, RemoteReference
from tailrace.errors import ConfigError, WorkerDied
from tailrace.rollout.rewards import WithReference
from tailrace.types import Sample


@asynccontextmanager
async def open_reference(model: Path, folder: Path) -> AsyncIterator[RemoteReference]:
    job = ReferenceJob(model=model, trainer=TrainerSettings(), temperature=0.7)
    worker = await LocalSpawner(folder).start("reference", ReferenceWorker, job)
    try:
        await worker.ready()
        yield RemoteReference(worker)
    finally:
        await worker.close()


def finished_samples(num: int) -> list[Sample]:
    """Sample n has n + 1 tokens."""
    samples = make_samples(num)
    for sample in samples:
        ids = list(range(3, 4 + sample.id.number))
        sample.extend(ids, [-1.0] * len(ids), version=0)
    return samples


async def test_samples_get_the_log_probs_of_the_model_until_the_process_is_killed(
    model_path: Path, tmp_path: Path
) -> None:
    """A request that is cancelled changes nothing."""
    samples = finished_samples(4)
    async with open_reference(model_path, tmp_path) as reference:
        tasks = [asyncio.create_task(reference.logprobs(sample)) for sample in samples]
        await asyncio.sleep(0)
        tasks[2].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        os.kill(reference._worker.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"reference \(process \d+\) ended: signal SIGKILL"):
            await reference.logprobs(samples[0])
    assert isinstance(found[2], asyncio.CancelledError)
    here = PolicyModel.load(model_path, TrainerSettings(), temperature=0.7)
    wanted = here.logprobs_of([TrainingSample.of(sample) for sample in samples])
    for number in (0, 1, 3):
        assert found[number] == pytest.approx(wanted[number], abs=1e-5)


async def test_a_damaged_model_folder_is_a_config_error_that_names_the_file(
    model_path: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in model_path.iterdir():
        whole = file.read_bytes()
        (broken / file.name).write_bytes(whole[:100] if file.suffix == ".safetensors" else whole)
    with pytest.raises(ConfigError, match=r"model\.path = .*model\.safetensors is damaged"):
        async with open_reference(broken, tmp_path):
            pass


async def test_the_reference_stays_at_the_first_weights_while_the_policy_is_trained(
    model_path: Path, tmp_path: Path
) -> None:
    async with workers(model_path, tmp_path, algorithm=AlgorithmSettings(kl_coef=0.1)) as opened:
        assert opened.reference is not None
        judge = WithReference(opened.rewards, opened.reference)
        samples = make_samples(6)

        async def roll_out(sample: Sample) -> None:
            await opened.engines[0].generate(sample)
            sample.reward = await judge.score(sample)

        await asyncio.gather(*map(roll_out, samples))
        for number, sample in enumerate(samples):
            assert sample.reference_logprobs == pytest.approx(sample.behavior_logprobs, abs=1e-4)
            sample.advantage = number - 2.5
        for _ in range(2):
            await opened.trainer.accumulate([samples], version=0)
            stats = await opened.trainer.step()
        assert stats.reference_kl > 1e-4, "the policy has changed"
        again = await opened.reference.logprobs(samples[0])
        assert again == pytest.approx(samples[0].reference_logprobs, abs=1e-5)
