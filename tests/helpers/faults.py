"""Faults in the way of weights, planted in the process of an embedded engine, and what they spoil.

FAULTS            with whole weights: what goes wrong, and the beginning of the cause that must be named
ADAPTER_FAULTS    with adapters
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.engine import Arrival
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import LoraSettings, TrainerSettings
from tailrace.contracts.weights import DTYPE, Link, Weights
from tailrace.drivers.engine.native import engine as native
from tailrace.drivers.engine.native import model as native_model
from tailrace.drivers.engine.probes import probe_ids
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.weights.settings import SharedMemorySettings, WeightsSettings
from tailrace.drivers.workers import engine as workers
from tailrace.drivers.workers.engine import EngineJob, EngineWorker, RemoteEngine
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.trainer import RemoteTrainer, TrainerJob, TrainerWorker
from tailrace.drivers.workers.worker import WorkerConnection
from tailrace.kinds import kind_of
from tailrace.model_folder import context_length, read_config
from tailrace.types import KV, Group, Prompt, Sample, SampleId

FAULTS: Mapping[str, str] = {
    "a dropped tensor": "tensors missing: 1 of ",
    "a changed tensor": "tensors changed on the way: 1 of ",
    "a skipped load": "weights not loaded: it computes with version 2 (all ",
    "an older version": "weights not loaded: it computes with version 1 (all ",
    "old copies": "older copies: each tensor has arrived",
    "a value that is not finite": "not finite: its log-probs are not (tensors changed on the way: 1 of ",
    "an old prefix cache": "stale prefix cache: ",
}
MEMORY = "no fault, but figures of a device"
ADAPTER_FAULTS: Mapping[str, str] = {
    "an adapter that is not loaded": "adapter not active: ",
    "an older adapter": "weights not loaded: it computes with version 1 (its log-probs have not moved",
}
SPOILED = 3
"""The load at which a planted fault happens, counted from 1."""
TENSOR = "model.layers.1.mlp.down_proj.weight"
LORA = LoraSettings(rank=4, alpha=8.0, publish="adapter")
SAMPLING = SamplingSettings(max_completion_tokens=32)


class PlantedJob(EngineJob):
    """Serve a model with a fault: one of FAULTS or ADAPTER_FAULTS, or none."""

    fault: str = ""


class PlantedEngine(EngineWorker):
    """Spoils one load."""

    job_type = PlantedJob
    _first: Mapping[str, Tensor]
    """What the first load brought."""

    def __init__(self, engine: native.NativeEngine, connection: WorkerConnection, job: PlantedJob) -> None:
        super().__init__(engine, connection, job)
        self._fault, self._num_loads = job.fault, 0
        model = engine._model
        self._load = "load" if job.adapter is None else "adapter"
        self._inner: Callable[..., object] = getattr(model, self._load)

    @classmethod
    def load_job(cls, job: PlantedJob, connection: WorkerConnection) -> EngineWorker:
        if job.fault == "old copies":
            native_model.MIN_PACKED = 1  # so that each matrix of a tiny model has one
        return super().load_job(job, connection)

    def load(self, weights: Weights, link: Link, kv: KV) -> Arrival | None:
        self._num_loads += 1
        with self._patched():
            return super().load(weights, link, kv)

    def _patched(self) -> AbstractContextManager[object]:
        if self._fault == MEMORY:
            peak = {"perf/max_memory_allocated_gb": float(self._num_loads)}
            return patch.object(workers, "used_on", lambda device: peak if device == "cpu" else {})
        if self._num_loads == SPOILED and self._fault == "old copies":
            return patch.object(native_model.Matrix, "pack", lambda matrix: None)
        if self._num_loads == SPOILED and self._fault == "an old prefix cache":
            return patch.object(native, "sibling_of", lambda fresh, version, others: next(iter(others), None))
        return patch.object(self._engine._model, self._load, self._spoiled)

    def _spoiled(self, tensors: Mapping[str, Tensor], *scale: float) -> object:
        model, new = self._engine._model, dict(tensors)
        if self._num_loads == 1:
            self._first = {name: tensor.clone() for name, tensor in tensors.items()}
        match self._fault if self._num_loads == SPOILED else "":
            case "a skipped load":
                return None
            case "an adapter that is not loaded":
                new = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            case "an older version" | "an older adapter":
                new = dict(self._first)
            case "a dropped tensor":
                new[TENSOR] = model.weights()[TENSOR].clone()
            case "a changed tensor":
                new[TENSOR] = 1.01 * tensors[TENSOR]
            case "a value that is not finite":
                new[TENSOR] = tensors[TENSOR].clone()
                new[TENSOR][0, 0] = torch.nan
        return self._inner(new, *scale)


@dataclass
class Publications:
    """A trainer in a process of its own, and the number of its last version."""

    trainer: RemoteTrainer
    vocabulary: int
    num_samples: int = 4
    """Of a step."""
    version: int = 0

    async def next(self) -> Weights:
        """Train one step on random tokens, and publish."""
        self.version += 1
        group = Group(Prompt(0, [n % self.vocabulary for n in range(self.version, self.version + 8)]), 1, [])
        for number in range(self.num_samples):
            sample = Sample(SampleId(0, 0, number), group, seed=number, finish_reason="stop")
            ids = [7 * (self.version + number) * place % self.vocabulary for place in range(1, 13)]
            sample.extend(ids, [-1.0] * len(ids), self.version - 1)
            sample.behavior_logprobs[:] = await self.trainer.logprobs(sample)
            sample.advantage = number + 1.0
            group.samples.append(sample)
        await self.trainer.accumulate([group.samples], version=self.version - 1)
        await self.trainer.step()
        return await self.trainer.publish(self.version)


@asynccontextmanager
async def publications(
    model: Path,
    folder: Path,
    *,
    kind: str = "native",
    learning_rate: float = 1e-2,
    lora: LoraSettings | None = None,
    dtype: DTYPE = "float32",
    weights: WeightsSettings | None = None,
    probed: bool = True,
    num_samples: int = 4,
) -> AsyncIterator[Publications]:
    """Start a trainer of a model."""
    vocabulary = read_config(model)["vocab_size"]
    job = TrainerJob(
        threads=1,
        model=model,
        trainer=TrainerSettings(learning_rate=learning_rate, lora=lora, dtype="float32"),
        algorithm=AlgorithmSettings(),
        sampling=SAMPLING,
        weights=weights or SharedMemorySettings(),
        published_dtype="float32" if lora else dtype,
        probe=probe_ids(kind_of("engine", kind).prefix, vocabulary, context_length(model)) if probed else (),
        probe_dtype=dtype,
    )
    trainer = RemoteTrainer([await LocalSpawner(folder / "logs").start("trainer", TrainerWorker, job)], job)
    try:
        await trainer.ready()
        yield Publications(trainer, vocabulary, num_samples)
    finally:
        await trainer.close()


async def arrivals(model: Path, folder: Path, fault: str) -> list[Arrival]:
    """Of four publications, of which the third is spoiled."""
    adapter = LORA if fault in ADAPTER_FAULTS else None
    engine_settings = NativeEngineSettings(threads=1)
    job = PlantedJob(model=model, engine=engine_settings, sampling=SAMPLING, adapter=adapter, fault=fault)
    async with AsyncExitStack() as stack:
        published = await stack.enter_async_context(publications(model, folder, lora=adapter))
        engine = RemoteEngine(await LocalSpawner(folder / "logs").start("engine", PlantedEngine, job), job)
        stack.push_async_callback(engine.close)
        await engine.ready()
        found = []
        for _ in range(4):
            await engine.load(await published.next(), kv="keep")
            assert engine.arrival is not None
            found.append(engine.arrival)
        return found
