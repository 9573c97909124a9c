"""The embedded engine: each is a process of the run."""

from collections.abc import Iterable
from pathlib import Path

from typing_extensions import override

from tailrace.config import PolicyConfig
from tailrace.contracts.engine import EngineProcess
from tailrace.contracts.memory import LOGIT_BYTES, TORCH_BYTES, ModelShape, ProcessMemory
from tailrace.contracts.trainer import LoraSettings
from tailrace.drivers.engine.native.support import GRAPH_ROWS, MAX_GATHERED, not_fused
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.kinds.base import BeginProcess, EngineKind, Opening
from tailrace.drivers.workers.engine import EngineJob, EngineWorker, RemoteEngine
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import ConfigError, say
from tailrace.model_folder import check_files
from tailrace.types import ITEM_BYTES


class Native(EngineKind):
    """The embedded engine."""

    settings = NativeEngineSettings
    prefix = 8
    verifies = True

    @override
    def check(self, config: PolicyConfig) -> None:
        assert isinstance(config.engine, NativeEngineSettings)
        check_served(config.model.path, config.engine, "engine.drafts")
        if config.trainer.adapter and (feature := not_fused(config.model.path)):
            problem = f"the embedded engine serves no adapters of a model with {feature}"
            remedy = 'write "merged", or engine.kind = "vllm"'
            raise ConfigError("trainer.lora.publish", "adapter", problem, remedy)

    @override
    def check_adapter(self, lora: LoraSettings, config: PolicyConfig) -> None:
        if config.weights.in_folders:
            problem = "the embedded engine reads a version in a folder as a whole model"
            remedy = 'choose another weights.transport, or write "merged"'
            raise ConfigError("trainer.lora.publish", lora.publish, problem, remedy)

    @override
    def memory(self, config: PolicyConfig, longest: int, adapters: int) -> Iterable[ProcessMemory]:
        assert isinstance(config.engine, NativeEngineSettings)
        if config.host.starts("engine"):
            shape = ModelShape.read(config.model.path)
            yield engine_memory(shape, config.engine, longest, adapters)

    @override
    def processes(self, opening: Opening, trainer: RemoteTrainer) -> BeginProcess:
        settings, spawner = opening.config.engine, opening.spawner
        assert isinstance(settings, NativeEngineSettings)
        job = EngineJob(
            threads=settings.threads,
            health_timeout_s=settings.health_timeout_s,
            model=opening.config.model.path,
            engine=settings,
            sampling=opening.config.sampling,
            adapter=opening.config.trainer.adapter,
        )

        async def begin(name: str, number: int, width: int) -> EngineProcess:
            worker = await spawner.start(name, EngineWorker, job, opening.devices.engines[number])
            remote = RemoteEngine(worker, job)
            remote.transfers = trainer.transfers
            return remote

        return begin


def check_served(path: Path, settings: NativeEngineSettings, key: str) -> None:
    """Check a model, and say if it is served slowly. Raises as `check_files`, and a ConfigError with the key
    of drafts where it cannot check them."""
    check_files(path)
    if feature := not_fused(path):
        if settings.drafts != "off":
            problem = f"the embedded engine checks no drafts with a model with {feature}"
            raise ConfigError(key, settings.drafts, problem, 'write "off"')
        way = f"by transformers' own forward pass, slower: {feature}"
        say(f'the embedded engine serves the model {way}; engine.kind = "vllm" may be faster')


def engine_memory(
    shape: ModelShape, settings: NativeEngineSettings, longest: int, adapters: int = 0
) -> ProcessMemory:
    """Estimate the memory of one engine. Arguments as `EngineKind.memory`."""
    size, seqs = ITEM_BYTES[settings.dtype], settings.max_num_seqs
    token, weights = shape.kv_bytes(size), size * shape.num_parameters
    # A prefill writes keys and values where they stay. CUDA graphs have the results of a step of their own,
    # and where the kernel of attention is missing copies of keys and values.
    position = size * (4 * shape.hidden_size + 3 * shape.mlp_size)
    prefill = position * min(settings.max_prefill_tokens, seqs * longest)
    rows = 0 if settings.device == "cpu" else min(seqs, GRAPH_ROWS[-1])
    captured = rows * (position + shape.vocabulary * LOGIT_BYTES)
    captured += 2 * token // shape.num_layers * MAX_GATHERED if rows else 0
    inputs = 5 * 8 * (seqs + 1)
    parts = {
        "weights": weights + size * adapters,
        "one sequence": token * longest,
        "KV cache": token * max(0, min(settings.kv_cache_tokens, seqs * longest) - longest),
        "computation": captured + inputs + max(prefill, seqs * shape.vocabulary * LOGIT_BYTES),
    }
    # In host memory are new weights, or on a CPU the copy for oneDNN (Matrix of native/model.py).
    host = {"process": TORCH_BYTES, "copy of the weights": weights}
    return ProcessMemory("engine", settings.device, parts, host, settings.num_engines)
