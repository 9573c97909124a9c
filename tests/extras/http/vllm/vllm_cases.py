"""Two vLLM servers for several tests, and the server's own record of what it generated."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PreTrainedModel

from helpers.tiny_models import VOCABULARY, save_tiny_model
from tailrace.contracts.engine import TokenCounter
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.weights import Link, Weights
from tailrace.drivers.engine.supervised import SupervisedEngine, watch_engines
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.drivers.weights.transfers import Transfers
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.extras.http import vllm
from tailrace.extras.http.dialect import Chunk, Launch
from tailrace.extras.http.engine import HttpEngine
from tailrace.extras.http.self_test import Expected, check_policy, check_server
from tailrace.extras.http.server import ManagedServer, ServerJob, free_port
from tailrace.extras.http.settings import VllmEngineSettings
from tailrace.extras.http.vllm import Vllm, detect, write_plugin
from tailrace.types import Sample, Span

DEADLINE_S = 300.0
NUM_TOKENS = 1000
CONTEXT = 2048
FILE = "model.safetensors"
SETTINGS = VllmEngineSettings(
    max_num_seqs=64,
    args=("--enforce-eager",),
    env={"VLLM_CPU_KVCACHE_SPACE": "1"},
    start_timeout_s=DEADLINE_S,
)
SAMPLING = SamplingSettings(max_completion_tokens=NUM_TOKENS)


Record = dict[str, list[Mapping[str, Any]]]


@dataclass(slots=True, kw_only=True)
class RecordingVllm(Vllm):
    """Keeps the raw events of each request: the server's own record."""

    record: Record = field(default_factory=dict)

    def chunk(self, event: Mapping[str, Any], num_received: int) -> Chunk:
        if "request_id" in event:  # else it is an error
            self.record.setdefault(str(event["request_id"]), []).append(event)
        return Vllm.chunk(self, event, num_received)


@dataclass
class Models:
    """Two models of one shape, in folders and in memory: those of versions 0 and 1."""

    folders: list[Path]
    inner: list[PreTrainedModel]

    @classmethod
    def save(cls, folder: Path) -> "Models":
        """Heads of 32 numbers: vLLM on a CPU has no kernels for smaller ones."""
        folders = [folder / f"version-{version}" for version in (0, 1)]
        shape = {"head_dim": 32, "max_position_embeddings": CONTEXT}
        return cls(folders, [save_tiny_model(each, seed=i, **shape) for i, each in enumerate(folders)])

    def weights(self, version: int) -> Weights:
        """A publication: even versions are the first model, odd ones the second."""
        return Weights(version, str(self.folders[version % 2] / FILE))


async def in_files(weights: Weights, link: Link) -> None:
    """The trainer's half of a transfer in files."""


@dataclass
class Servers:
    """Two engines over two servers."""

    runner: asyncio.Runner
    models: Models
    engines: list[SupervisedEngine]
    urls: list[str]
    records: list[Record] = field(default_factory=lambda: [{}, {}])
    """What each server has said, by request, in the order of the requests."""

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Drive a test. The engines are idle afterwards, and have version 0 again."""

        async def whole() -> None:
            async with asyncio.timeout(DEADLINE_S):
                try:
                    await main
                finally:
                    for engine in self.engines:
                        await engine.load(self.models.weights(0), kv="recompute")
                for engine in self.engines:
                    usage = engine.usage()
                    assert (usage.num_running, usage.num_waiting, usage.kv_tokens) == (0, 0, 0)

        self.runner.run(whole())


def logprobs(model: PreTrainedModel, sample: Sample) -> list[float]:
    """The log-probs of a sample's tokens under one model."""
    ids = torch.tensor([[*sample.prompt.ids, *sample.completion_ids]])
    with torch.no_grad():
        every = model(ids).logits[0].float().log_softmax(-1)
    start = len(sample.prompt.ids)
    places = torch.arange(start - 1, ids.shape[1] - 1)
    return every[places, ids[0, start:]].tolist()


@asynccontextmanager
async def opened(
    runner: asyncio.Runner,
    folder: Path,
    settings: VllmEngineSettings = SETTINGS,
    sampling: SamplingSettings = SAMPLING,
    names: Sequence[str] = ("one", "other"),
) -> AsyncIterator[Servers]:
    """Start servers of these names; every self-test runs on each."""
    models = Models.save(folder)
    plugins = write_plugin(folder / "plugin")
    expected = Expected(settings, sampling, VOCABULARY, CONTEXT)
    servers = Servers(runner, models, [], [])

    async def recording(client: httpx.AsyncClient) -> RecordingVllm:
        found = await detect(client, sampling, ())
        given = {each.name: getattr(found, each.name) for each in fields(found) if each.init}
        record = servers.records[servers.urls.index(str(client.base_url).rstrip("/"))]
        return RecordingVllm(**given, record=record)

    async def trainer_logprobs(sample: Sample) -> list[float]:
        return logprobs(models.inner[0], sample)

    async def check(engine: HttpEngine) -> None:
        await check_server(engine.connection, expected)
        await check_policy(engine, expected, models.weights(0), trainer_logprobs)

    def engine(name: str) -> SupervisedEngine:
        port = free_port()
        launch = vllm.launch(
            settings,
            sampling,
            model=models.folders[0],
            max_context=CONTEXT,
            port=port,
            plugins=plugins,
            seed=port,
        )
        job = ServerJob(command=launch.command, env=dict(launch.env))
        servers.urls.append(f"http://127.0.0.1:{port}")

        async def begin() -> HttpEngine:
            server = await ManagedServer.start(name, job, LocalSpawner(folder), port, DEADLINE_S)
            return HttpEngine(
                name,
                server,
                recording,
                health_timeout_s=60.0,
                check=check,
                transfers=Transfers(in_files),
                expected=expected_tensors(models.folders[0], "float32"),
                decode=str,
            )

        return SupervisedEngine(name, settings.max_num_seqs, begin, TokenCounter())

    servers.engines = [engine(name) for name in names]
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in servers.engines:
                tasks.create_task(each.open())
        watching = asyncio.create_task(watch_engines(servers.engines, recovery_timeout_s=DEADLINE_S))
        yield servers
        watching.cancel()
        await asyncio.wait([watching])
    finally:
        await asyncio.gather(*(each.close() for each in servers.engines))


@contextmanager
def running(launch: Launch, port: int, folder: Path) -> Iterator[str]:
    """Run one server, and yield its address.

    Args:
        folder: receives its log.
    """
    job = ServerJob(command=launch.command, env=dict(launch.env))

    async def start() -> ManagedServer:
        server = await ManagedServer.start("vllm", job, LocalSpawner(folder), port, DEADLINE_S)
        await server.ready()
        return server

    with asyncio.Runner() as runner:
        server = runner.run(start())
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            runner.run(server.close())


def told_spans(events: list[Mapping[str, Any]]) -> list[Span]:
    """The versions that a server gives for one request; the label of a server that was told none is 0's."""
    choices = [choice for event in events for choice in event["choices"]]
    told = [span for choice in choices for span in choice.get("weight_versions") or ()]
    labels = [0 if span["version"] == "default" else int(span["version"]) for span in told]
    return [Span(label, span["end"] - span["start"]) for label, span in zip(labels, told, strict=True)]


def told_ids(events: list[Mapping[str, Any]]) -> list[int]:
    """The tokens that a server sent for one request."""
    return [id for event in events for choice in event["choices"] for id in choice["token_ids"] or ()]


def told_count(events: list[Mapping[str, Any]]) -> int:
    """The number of tokens that a server says it has sent for one request."""
    return int(events[-1]["usage"]["completion_tokens"])


def joined(spans: list[Span]) -> list[Span]:
    """Spans of one version after another as one."""
    found: list[Span] = []
    for version, num_tokens in spans:
        if found and found[-1].version == version:
            num_tokens += found.pop().num_tokens
        found.append(Span(version, num_tokens))
    return found
