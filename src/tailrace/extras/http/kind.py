"""Kinds of engines behind HTTP: vLLM, SGLang, and those with PipelineRL's routes. The run starts servers, or
joins them."""

import asyncio
import itertools
import os
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import httpx
from typing_extensions import override

from tailrace.config import LiveConfig, PolicyConfig
from tailrace.contracts.memory import MIB, ModelShape, ProcessMemory
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import LoraSettings
from tailrace.contracts.weights import TensorInfo, Weights
from tailrace.devices import Devices
from tailrace.drivers.data.settings import longest_sequence
from tailrace.drivers.engine.settings import ServerEngineSettings
from tailrace.drivers.kinds.base import BeginProcess, EngineKind, Opening
from tailrace.drivers.trainer.adapter import adapter_tensors
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import ConfigError, EngineDied, ServerRefused
from tailrace.extras.http import pipelinerl, sglang, vllm
from tailrace.extras.http.dialect import Dialect, Launch, find_interpreter
from tailrace.extras.http.engine import HEALTH_EVERY_S, HttpEngine, Server
from tailrace.extras.http.self_test import Expected, check_policy, check_server
from tailrace.extras.http.server import JoinedServer, ManagedServer, ServerJob, free_port
from tailrace.extras.http.settings import PipelineRlEngineSettings, SglangEngineSettings, VllmEngineSettings
from tailrace.model_folder import check_files, context_length, end_of_text_ids, read_config
from tailrace.types import ITEM_BYTES

SERVER_BYTES = 3072 * MIB
"""The processes of an inference server, without weights and KV cache."""


class HttpEngines:
    """Starts or joins the inference servers of a run. Its trainer may still be starting."""

    def __init__(self, kind: "ServerKind", opening: Opening, trainer: RemoteTrainer) -> None:
        config, settings = LiveConfig.of(opening.config), opening.config.engine
        assert isinstance(settings, ServerEngineSettings)
        self._kind, self._settings, self._opening = kind, settings, opening
        self.model, self.sampling, self.trainer = opening.config.model.path, opening.config.sampling, trainer
        self.end_of_text = end_of_text_ids(self.model)
        self.adapter = adapter = config.trainer.adapter
        self.seeds = itertools.count(1)
        """One for each server that is started."""
        context, data = context_length(self.model), config.data
        longest = partial(longest_sequence, data, self.sampling, max_context_tokens=context)
        self.max_context = max(longest(unbounded_prompt=context), len(opening.probe) + 1)
        """Tokens of a prompt and its completion that a server which the run starts takes."""
        if config.environment.has_turns:
            self.max_context = context
        vocabulary, dtype = read_config(self.model)["vocab_size"], config.trainer.dtype
        shortest = longest(unbounded_prompt=1)
        self._expected = Expected(settings, self.sampling, vocabulary, shortest, dtype)
        self._tensors: Sequence[TensorInfo] = (
            adapter_tensors(self.model, adapter) if adapter else expected_tensors(self.model, settings.dtype)
        )
        self._compared: set[str] = set()
        """Engines that were compared with the trainer."""
        self._initial: Weights | None = None
        self._comparing = asyncio.Lock()

    async def begin(self, name: str, number: int, width: int = 1) -> HttpEngine:
        """Start or join the server of engine `number`. `width`: engines whose devices it uses as one
        tensor-parallel group, itself and the next ones."""
        settings = self._settings.model_copy(
            update={
                "tensor_parallel_size": self._settings.tensor_parallel_size * width,
                "max_num_seqs": self._settings.max_num_seqs * width,
            }
        )
        if settings.urls:
            server: Server = JoinedServer(settings.urls[number])
        else:
            server = await self._start(name, settings, self._joined_devices(number, width))
        return HttpEngine(
            name,
            server,
            self._detect,
            health_timeout_s=settings.health_timeout_s,
            check=self._check,
            transfers=self.trainer.transfers,
            expected=self._tensors,
            decode=self._opening.decode,
            dtype=settings.dtype,
            adapter=self.adapter is not None,
            num_ranks=settings.tensor_parallel_size,
            standalone=self._kind.standalone,
        )

    def _joined_devices(self, number: int, width: int) -> Devices | None:
        members = [each for each in self._opening.devices.engines[number : number + width] if each]
        cpus = chain.from_iterable(each.cpus for each in members)
        gpus = chain.from_iterable(each.gpus for each in members)
        return Devices(tuple(cpus), tuple(gpus)) if members else None

    async def _start(
        self, name: str, settings: ServerEngineSettings, devices: Devices | None
    ) -> ManagedServer:
        port, plugins = free_port(), Path(gettempdir()) / f"tailrace-plugin-{os.urandom(6).hex()}"
        launch = self._kind.launch(settings, self, port, plugins)
        needs = {"model.path": self.model, "engine.python": Path(launch.command[0]).parent}
        env, health_s = dict(launch.env), settings.health_timeout_s
        job = ServerJob(
            command=launch.command, env=env, plugins=plugins, needs=needs, health_timeout_s=health_s
        )
        return await ManagedServer.start(
            name, job, self._opening.spawner, port, settings.start_timeout_s, devices
        )

    async def _detect(self, client: httpx.AsyncClient) -> Dialect:
        try:
            return await self._kind.detect(client, self)
        except (EngineDied, ServerRefused) as error:
            if not self._settings.urls:
                raise
            url, kind = str(client.base_url).rstrip("/"), self._settings.kind
            problem = f"no {kind} server answers there ({error})"
            raise ConfigError("engine.urls", url, problem, "start it, or correct the address") from error

    async def _check(self, engine: HttpEngine) -> None:
        await check_server(engine.connection, self._expected)
        if engine.name in self._compared:
            return
        await self.trainer.ready()
        async with self._comparing:
            self._initial = self._initial or await self.trainer.publish(0)
            await check_policy(engine, self._expected, self._initial, self.trainer.logprobs)
        self._compared.add(engine.name)


class ServerKind(EngineKind):
    """A kind of inference server."""

    settings: type[ServerEngineSettings]
    settle_s = 2 * HEALTH_EVERY_S
    standalone = False
    """Each link to a server has an address of its own."""
    transport, no_other = "", ""
    """The only transport by which it takes weights, and why; empty: it takes any."""

    @override
    def check(self, config: PolicyConfig) -> None:
        assert isinstance(config.engine, ServerEngineSettings)
        check_files(config.model.path)
        self.check_sampling(config.engine, config.sampling)
        given = config.weights.transport
        if self.transport and given != self.transport:
            raise ConfigError("weights.transport", given, self.no_other, f'set it to "{self.transport}"')

    @override
    def check_installed(self, settings: ServerEngineSettings) -> None:
        if not settings.urls:
            find_interpreter(settings)

    def check_sampling(self, settings: Any, sampling: SamplingSettings) -> None:
        """Raises a ConfigError if its log-probs would not be those of the policy."""

    @override
    def memory(self, config: PolicyConfig, longest: int, adapters: int) -> Iterable[ProcessMemory]:
        assert isinstance(config.engine, ServerEngineSettings)
        if not config.engine.urls:
            device = "cuda" if config.engines_on_gpu else "cpu"
            yield server_memory(ModelShape.read(config.model.path), config.engine, longest, device)

    @override
    def processes(self, opening: Opening, trainer: RemoteTrainer) -> BeginProcess:
        return HttpEngines(self, opening, trainer).begin

    def launch(self, settings: Any, engines: HttpEngines, port: int, plugins: Path) -> Launch:
        """Return how one server is started. Arguments as those of vllm.launch."""
        raise NotImplementedError

    async def detect(self, client: httpx.AsyncClient, engines: HttpEngines) -> Dialect:
        """Ask a server what it can do. Raises EngineDied or ServerRefused if none of this kind answers."""
        raise NotImplementedError


class VllmServers(ServerKind):
    """vLLM."""

    settings = VllmEngineSettings
    prefix = vllm.PREFIX

    @override
    def check_adapter(self, lora: LoraSettings, config: PolicyConfig) -> None:
        key, transport = "trainer.lora", config.weights.transport
        if not config.weights.in_folders:
            problem = f"vLLM reads an adapter from a folder, and weights.transport is {transport!r}"
            remedy = 'set weights.transport = "filesystem", or write "merged"'
            raise ConfigError(f"{key}.publish", lora.publish, problem, remedy)
        if vllm.max_rank(lora.rank) is None:
            problem = f"vLLM takes adapters of a rank of {vllm.MAX_RANKS[-1]} at most"
            raise ConfigError(f"{key}.rank", lora.rank, problem, 'lower it, or set publish = "merged"')

    @override
    def check_sampling(self, settings: VllmEngineSettings, sampling: SamplingSettings) -> None:
        vllm.check_sampling(sampling)
        vllm.check_drafts(settings, sampling)

    @override
    def launch(self, settings: VllmEngineSettings, engines: HttpEngines, port: int, plugins: Path) -> Launch:
        return vllm.launch(
            settings,
            engines.sampling,
            model=engines.model,
            max_context=engines.max_context,
            port=port,
            plugins=plugins,
            seed=next(engines.seeds),
            adapter=engines.adapter,
        )

    @override
    async def detect(self, client: httpx.AsyncClient, engines: HttpEngines) -> Dialect:
        num_adapters = engines.adapter.versions if engines.adapter else 0
        sampling, end_of_text = engines.sampling, engines.end_of_text
        return await vllm.detect(client, sampling, end_of_text, num_adapters=num_adapters)


class SglangServers(ServerKind):
    """SGLang."""

    settings = SglangEngineSettings
    transport, no_other = "filesystem", "SGLang reads weights from a folder"

    @override
    def launch(
        self, settings: SglangEngineSettings, engines: HttpEngines, port: int, plugins: Path
    ) -> Launch:
        return sglang.launch(settings, model=engines.model, max_context=engines.max_context, port=port)

    @override
    async def detect(self, client: httpx.AsyncClient, engines: HttpEngines) -> Dialect:
        return await sglang.detect(client, engines.sampling, engines.end_of_text)


class PipelineRlEngines(ServerKind):
    """Any engine with the routes that PipelineRL needs."""

    settings = PipelineRlEngineSettings
    standalone = True
    transport, no_other = "process_group", "such an engine takes weights over a process group"

    @override
    async def detect(self, client: httpx.AsyncClient, engines: HttpEngines) -> Dialect:
        rendezvous = engines.trainer.rendezvous
        return await pipelinerl.detect(client, engines.sampling, engines.end_of_text, rendezvous)


def server_memory(
    shape: ModelShape, settings: ServerEngineSettings, longest: int, device: str
) -> ProcessMemory:
    """Estimate the memory of one server. It takes the KV cache that its device has room for. `longest`: as in
    `EngineKind.memory`."""
    size, split = ITEM_BYTES[settings.dtype], settings.tensor_parallel_size
    parts = {"weights": size * shape.num_parameters // split, "one sequence": shape.kv_bytes(size) * longest}
    host = {"process": SERVER_BYTES * split}
    return ProcessMemory("engine", device, parts, host, settings.num_engines)
