"""What sleeps gives its memory back to the machine: an engine, a trainer, and both in turn. A trainer gives
back that of its activations."""

import asyncio
import resource
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors import safe_open

from helpers.engine_contract import fresh_samples
from helpers.tiny_models import save_tiny_model
from helpers.worker_cases import process_of, start_engine
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.engine import TokenCounter
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import LoraSettings, TrainerSettings
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.engine.supervised import SupervisedEngine
from tailrace.drivers.weights.settings import SharedMemorySettings
from tailrace.drivers.workers.engine import EngineJob
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.trainer import RemoteTrainer, TrainerJob, TrainerWorker, trainer_jobs
from tailrace.errors import Evicted, NotWoken

PAGE = 4096
LAYERS, KV_HEADS, HEAD_DIM = 8, 4, 64
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
"""Of one position, in float32."""
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "initializer_range": 0.02,
}
"""25 million parameters."""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def weight_bytes(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    sizes = [1] * len(shapes)
    for number, shape in enumerate(shapes):
        for length in shape:
            sizes[number] *= length
    return 4 * sum(sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_sleeping_engine_gives_back_its_weights_and_cache_and_goes_on_with_equal_log_probs(
    tmp_path: Path,
) -> None:
    save_tiny_model(tmp_path, **SHAPE)
    sampling = SamplingSettings(max_completion_tokens=24)
    job = EngineJob(
        model=tmp_path,
        engine=NativeEngineSettings(max_num_seqs=8),
        sampling=sampling,
        report_every_s=0.05,
    )
    logs = tmp_path / "logs"
    engine = SupervisedEngine("engine", 8, lambda: start_engine("engine", job, logs), TokenCounter())
    await engine.open()
    try:
        whole, interrupted = fresh_samples(8), fresh_samples(8)
        await asyncio.gather(*(engine.generate(sample) for sample in whole))
        requests = asyncio.gather(
            *(engine.generate(sample) for sample in interrupted), return_exceptions=True
        )
        while min(sample.num_tokens for sample in interrupted) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pid = process_of(engine).pid
        awake = resident_bytes(pid)
        await engine.sleep()
        asleep = resident_bytes(pid)
        assert all(isinstance(error, Evicted) for error in await requests)
        positions = sum(len(sample.prompt.ids) + sample.num_tokens for sample in interrupted)
        assert awake - asleep >= weight_bytes(tmp_path) + positions * KV_BYTES
        await engine.wake()
        await asyncio.gather(*(engine.generate(sample) for sample in interrupted))
        for one, other in zip(whole, interrupted, strict=True):
            assert one.completion_ids == other.completion_ids
            assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=1e-5)
        again = resident_bytes(pid)
        await engine.sleep()
        assert again - resident_bytes(pid) >= weight_bytes(tmp_path)
    finally:
        with suppress(Evicted):
            await engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process")
async def test_an_engine_without_the_memory_to_wake_says_so_and_sleeps_on(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, **SHAPE)
    sampling = SamplingSettings(max_completion_tokens=24)
    job = EngineJob(model=tmp_path, engine=NativeEngineSettings(), sampling=sampling)
    engine = await start_engine("engine", job, tmp_path / "logs")
    try:
        await engine.ready()
        await engine.sleep()
        pid = engine.worker.process.pid
        present = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * PAGE
        no_limit = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (present + weight_bytes(tmp_path) // 2, no_limit[1]))
        with pytest.raises(NotWoken, match="memory"):
            await engine.wake()
        resource.prlimit(pid, resource.RLIMIT_AS, no_limit)
        await engine.wake()
        (sample,) = fresh_samples(1)
        await engine.generate(sample)
        assert sample.num_tokens == 24
    finally:
        await engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_engine_and_trainer_in_turn_hold_the_memory_of_one_of_them(tmp_path: Path) -> None:
    """The trainer gives back weights, gradients and two moments, the engine weights and KV cache."""
    save_tiny_model(tmp_path, **SHAPE | {"num_hidden_layers": 3})
    sampling, weights = SamplingSettings(max_completion_tokens=64), SharedMemorySettings()
    offload = {"weights": "disk", "gradients": "disk", "optimizer": "disk"}
    job = TrainerJob(
        model=tmp_path,
        trainer=TrainerSettings.model_validate({"offload": offload}),
        algorithm=AlgorithmSettings(),
        sampling=sampling,
        weights=weights,
        published_dtype="float32",
    )
    engine_job = EngineJob(model=tmp_path, engine=NativeEngineSettings(max_num_seqs=8), sampling=sampling)
    state = weight_bytes(tmp_path)
    kv = 8 * 64 * KV_BYTES * 3 // LAYERS
    logs = tmp_path / "logs"
    engine = SupervisedEngine("engine", 8, lambda: start_engine("engine", engine_job, logs), TokenCounter())
    worker = await LocalSpawner(logs).start("trainer", TrainerWorker, job)
    trainer = RemoteTrainer([worker], job)
    try:
        await trainer.ready()
        await trainer.sleep()
        await engine.open()
        pids = process_of(engine).pid, worker.process.pid

        def resident() -> tuple[int, int]:
            return resident_bytes(pids[0]), resident_bytes(pids[1])

        for turn in range(2):
            samples = fresh_samples(8)
            await asyncio.gather(*(engine.generate(sample) for sample in samples))
            for number, sample in enumerate(samples):
                sample.advantage = 1.0 - 2 * (number % 2)
            generating = resident()
            await engine.sleep()
            await trainer.wake()
            await trainer.accumulate([samples], version=turn)
            await trainer.step()
            training = resident()
            published = await trainer.publish(turn + 1)
            await trainer.sleep()
            both_asleep = resident()
            assert generating[0] - both_asleep[0] >= state + kv
            assert training[1] - both_asleep[1] >= 4 * state
            assert training[0] < generating[0] - state
            assert training[1] - generating[1] >= 4 * state
            await engine.load(published, kv="recompute")
            await engine.wake()
    finally:
        with suppress(Evicted):
            await engine.close()
        await trainer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_trainer_of_an_adapter_gives_back_its_activations(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, **SHAPE)
    job = TrainerJob(
        model=tmp_path,
        trainer=TrainerSettings(lora=LoraSettings(rank=16), max_tokens_per_microbatch=2048),
        algorithm=AlgorithmSettings(),
        sampling=SamplingSettings(max_completion_tokens=1024),
        weights=SharedMemorySettings(),
        published_dtype="float32",
    )
    ((name, alone),) = trainer_jobs(job)
    worker = await LocalSpawner(tmp_path / "logs").start(name, TrainerWorker, alone)
    trainer = RemoteTrainer([worker], alone)
    try:
        await trainer.ready()
        pid = worker.process.pid
        before = resident_bytes(pid)
        samples = fresh_samples(2)
        for number, sample in enumerate(samples):
            sample.extend([7] * 550, [-1.0] * 550, version=0)
            sample.advantage = 1.0 - 2 * number
        await trainer.accumulate([samples], version=0)
        await trainer.step()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        assert resident_bytes(pid) - before < (peak - before) / 4
    finally:
        await trainer.close()
