"""All workers of a host together: started, wired by shared memory, ended."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.processes import start_controller
from helpers.worker_cases import is_running, make_samples, pids_of, until_gone, workers
from tailrace.contracts.trainer import StepStats
from tailrace.contracts.weights import Weights
from tailrace.drivers.assembly.open import Workers, ended_by_death
from tailrace.drivers.workers import calls
from tailrace.errors import CheckpointError, ConfigError, ScheduleError, WorkerDied
from tailrace.types import Sample


async def roll_out(opened: Workers, num: int) -> list[Sample]:
    samples = make_samples(num)
    engines = opened.engines
    await asyncio.gather(*(engines[i % len(engines)].generate(sample) for i, sample in enumerate(samples)))
    for sample in samples:
        sample.reward = await opened.rewards.score(sample)
        sample.advantage = float(sample.completion_ids.count(9)) - 1.0
    return samples


async def publish(opened: Workers, version: int) -> Weights:
    weights = await opened.trainer.publish(version)
    await asyncio.gather(*(engine.load(weights, kv="recompute") for engine in opened.engines))
    return weights


async def train(opened: Workers, samples: list[Sample]) -> StepStats:
    await opened.trainer.accumulate([samples[:4], samples[4:]], version=0)
    return await opened.trainer.step()


async def step_and_repeat(opened: Workers, model: Path, start: Path) -> None:
    """A step reaches the engines; a trainer that is restored repeats it."""
    await (await opened.trainer.save(start))
    first = await roll_out(opened, 8)
    assert [s.reward for s in first] == [len(s.text) + len("what?") / 8 for s in first]
    assert await opened.trainer.ess([first], version=0) == pytest.approx(1.0, abs=1e-4)
    stats = await train(opened, first)
    assert stats.samples == tuple(sample.id for sample in first)
    assert stats.num_tokens == sum(sample.num_tokens for sample in first)
    assert stats.grad_norm > 0
    weights = await publish(opened, 1)
    before, after = load_file(model / "model.safetensors"), load_file(f"{weights.location}/model.safetensors")
    assert after.keys() == before.keys()
    assert not any(after[name].equal(before[name]) for name in after)
    second = await roll_out(opened, 8)
    assert {span.version for sample in second for span in sample.spans} == {1}
    assert [s.behavior_logprobs for s in second] != [s.behavior_logprobs for s in first]

    await opened.trainer.restore(start)
    await publish(opened, 0)
    again = await roll_out(opened, 8)
    assert [s.completion_ids for s in again] == [s.completion_ids for s in first]
    assert [s.behavior_logprobs for s in again] == [s.behavior_logprobs for s in first]
    assert replace(await train(opened, again), compute_s=stats.compute_s) == stats


async def test_workers_train_publish_restore_refuse_and_end_together_when_one_dies(
    model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkerDied, match=r"trainer \(process \d+\) ended: signal SIGKILL"):
        async with workers(model_path, tmp_path) as opened:
            await step_and_repeat(opened, model_path, tmp_path / "start")
            with pytest.raises(CheckpointError, match="nowhere"):
                await opened.trainer.restore(tmp_path / "nowhere")
            with pytest.raises(ScheduleError, match="accumulate"):
                await opened.trainer.step()
            weights = await opened.trainer.publish(3)  # a refusal leaves it as it was
            pids = pids_of(opened)
            os.kill(opened.trainer.workers[0].process.pid, signal.SIGKILL)
            await asyncio.get_running_loop().create_future()
    await until_gone(*pids)
    assert not Path(weights.location).parent.exists()


async def test_one_bad_job_ends_all_the_others(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CLOSE_S", 0.1)  # the others are still loading
    with pytest.raises(ConfigError, match=r"reward\.function"):
        async with workers(model_path, tmp_path, function="helpers.reward_cases:nothing"):
            pass


async def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="in the block"):
        async with ended_by_death([]):
            raise KeyError("in the block")


CONTROLLER = """
import asyncio, os, sys
from pathlib import Path
from tailrace.drivers.workers.process_tree import children_of, parent_of
from helpers.worker_cases import make_samples, pids_of, workers

async def main():
    async with workers(Path(sys.argv[1]), Path(sys.argv[2])) as opened:
        weights = await opened.trainer.publish(1)
        forked = children_of(parent_of(pids_of(opened)[0]))
        scorers = [each for each in forked if each not in pids_of(opened)]
        print(weights.location, *pids_of(opened), *scorers, flush=True)
        while True:
            await asyncio.gather(*(opened.engines[0].generate(sample) for sample in make_samples(64)))

asyncio.run(main())
"""


@pytest.mark.slow  # tests/drivers/workers/test_process.py kills a controller that has only stand-ins
async def test_nothing_is_left_of_the_workers_when_their_controller_is_killed(
    model_path: Path, tmp_path: Path
) -> None:
    """Neither processes nor shared memory, while the engine works and all others are stopped."""
    controller, (location, *words) = await start_controller(CONTROLLER, model_path, tmp_path)
    pids = [int(pid) for pid in words]
    assert all(is_running(pid) for pid in pids) and Path(location).exists()
    trainer, _, *scorers = pids
    for pid in (trainer, *scorers):
        os.kill(pid, signal.SIGSTOP)
    controller.kill()
    await until_gone(*pids)
    await controller.communicate()
    assert not Path(location).parent.exists()
