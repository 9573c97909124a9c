"""Engines behind HTTP: servers that the run starts, or joins."""

import asyncio
import itertools
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from tempfile import gettempdir

import httpx

from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.contracts.weights import TensorInfo, Weights
from tailrace.devices import Devices
from tailrace.drivers.engine.settings import (
    HttpEngineSettings,
    PipelineRlEngineSettings,
    ServerEngineSettings,
    SglangEngineSettings,
    VllmEngineSettings,
)
from tailrace.drivers.engine.stops import Decoder
from tailrace.drivers.trainer.adapter import adapter_tensors
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.drivers.workers.calls import Spawner
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import ConfigError, EngineDied, ServerRefused
from tailrace.extras.http import pipelinerl, sglang, vllm
from tailrace.extras.http.dialect import Dialect, Launch
from tailrace.extras.http.engine import HttpEngine, Server
from tailrace.extras.http.self_test import Expected, check_policy, check_server
from tailrace.extras.http.server import JoinedServer, ManagedServer, ServerJob, free_port
from tailrace.model_folder import end_of_text_ids, read_config


class HttpEngines:
    """Starts or joins the inference servers of a run.

    Args:
        model: the Hugging Face folder.
        spawner: starts servers.
        devices: of each engine.
        min_context: tokens of a prompt and its completion that a server must take.
        max_context: those that a server which the run starts takes.
        decode: as the servers do.
        trainer: publishes the weights. It may still be starting.
    """

    def __init__(
        self,
        model: Path,
        settings: HttpEngineSettings,
        sampling: SamplingSettings,
        *,
        spawner: Spawner,
        devices: Sequence[Devices | None],
        min_context: int,
        max_context: int,
        decode: Decoder,
        trainer: RemoteTrainer,
        trainer_settings: TrainerSettings,
    ) -> None:
        self._model, self._settings, self._sampling = model, settings, sampling
        self._spawner, self._trainer, self._decode = spawner, trainer, decode
        self._devices, self._max_context = devices, max_context
        self._end_of_text = end_of_text_ids(model)
        vocabulary = read_config(model)["vocab_size"]
        self._expected = Expected(settings, sampling, vocabulary, min_context, trainer_settings.dtype)
        self._adapter = adapter = trainer_settings.adapter
        self._tensors: Sequence[TensorInfo] = (
            adapter_tensors(model, adapter) if adapter else expected_tensors(model, settings.dtype)
        )
        self._compared: set[str] = set()
        """Engines that were compared with the trainer."""
        self._seeds = itertools.count(1)
        """One for each server that is started."""
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
            send=self._trainer.send,
            expected=self._tensors,
            decode=self._decode,
            dtype=settings.dtype,
            adapter=self._adapter is not None,
            num_ranks=settings.tensor_parallel_size,
            standalone=isinstance(settings, PipelineRlEngineSettings),
        )

    def _joined_devices(self, number: int, width: int) -> Devices | None:
        members = [each for each in self._devices[number : number + width] if each]
        cpus = chain.from_iterable(each.cpus for each in members)
        gpus = chain.from_iterable(each.gpus for each in members)
        return Devices(tuple(cpus), tuple(gpus)) if members else None

    async def _start(
        self, name: str, settings: ServerEngineSettings, devices: Devices | None
    ) -> ManagedServer:
        port, plugins = free_port(), Path(gettempdir()) / f"tailrace-plugin-{os.urandom(6).hex()}"
        launch = self._launch(settings, port, plugins)
        needs = {"model.path": self._model, "engine.python": Path(launch.command[0]).parent}
        env, health_s = dict(launch.env), settings.health_timeout_s
        job = ServerJob(
            command=launch.command, env=env, plugins=plugins, needs=needs, health_timeout_s=health_s
        )
        return await ManagedServer.start(name, job, self._spawner, port, settings.start_timeout_s, devices)

    def _launch(self, settings: ServerEngineSettings, port: int, plugins: Path) -> Launch:
        if isinstance(settings, SglangEngineSettings):
            return sglang.launch(settings, model=self._model, max_context=self._max_context, port=port)
        assert isinstance(settings, VllmEngineSettings)
        return vllm.launch(
            settings,
            self._sampling,
            model=self._model,
            max_context=self._max_context,
            port=port,
            plugins=plugins,
            seed=next(self._seeds),
            adapter_rank=self._adapter.rank if self._adapter else None,
            num_adapters=self._adapter.versions if self._adapter else 1,
        )

    async def _detect(self, client: httpx.AsyncClient) -> Dialect:
        sampling, end_of_text = self._sampling, self._end_of_text
        try:
            if isinstance(self._settings, SglangEngineSettings):
                return await sglang.detect(client, sampling, end_of_text)
            if isinstance(self._settings, PipelineRlEngineSettings):
                return await pipelinerl.detect(client, sampling, end_of_text, self._trainer.rendezvous)
            num_adapters = self._adapter.versions if self._adapter else 0
            return await vllm.detect(client, sampling, end_of_text, num_adapters=num_adapters)
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
        await self._trainer.ready()
        async with self._comparing:
            self._initial = self._initial or await self._trainer.publish(0)
            await check_policy(engine, self._expected, self._initial, self._trainer.logprobs)
        self._compared.add(engine.name)
