"""Each fault in the way of weights to a vLLM server is found by the first probe after it and named."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import planted
import pytest
from vllm_cases import CONTEXT, DEADLINE_S, SETTINGS, in_files

from helpers.faults import LORA, SAMPLING, Publications, publications
from helpers.tiny_models import save_tiny_model
from tailrace.engine import vllm
from tailrace.engine.dialect import Attempt
from tailrace.engine.http import HttpEngine
from tailrace.engine.vllm import VllmAdapters, write_plugin
from tailrace.trainer.adapter import adapter_tensors
from tailrace.trainer.base import LoraSettings
from tailrace.weights.base import FilesystemSettings, expected_tensors
from tailrace.workers.process import LocalSpawner
from tailrace.workers.server import ManagedServer, ServerJob, free_port

pytestmark = pytest.mark.vllm
CAUSES: Mapping[str, str] = {
    "": "",
    "a dropped tensor": "tensors missing or changed",
    "a changed tensor": "tensors missing or changed",
    "a skipped load": "weights not loaded: it computes with version 6 ",
    "an older version": "weights not loaded: it computes with version 6 ",
    "old copies": "tensors missing or changed",
    "a value that is not finite": "not finite: its log-probs are not",
    "an old prefix cache": "stale prefix cache: ",
}
"""By the fault of a publication; the next one is sound. Which tensor is wrong cannot be seen from outside."""


@asynccontextmanager
async def opened(
    folder: Path, lora: LoraSettings | None = None
) -> AsyncIterator[tuple[Publications, HttpEngine]]:
    """A trainer, and a server with the plug-in that spoils what it is told."""
    model, port, plugins = folder / "model", free_port(), write_plugin(folder / "plugin")
    save_tiny_model(model, head_dim=32, max_position_embeddings=CONTEXT)
    info = plugins / "tailrace_plugin-0.dist-info" / "entry_points.txt"
    info.write_text("[vllm.general_plugins]\ntailrace = planted:register\n")
    for name in ("planted.py", "planted_transfer.py"):
        (plugins / name).symlink_to(Path(__file__).parent / name)
    (folder / "fault").write_text("")
    launch = vllm.launch(
        SETTINGS,
        SAMPLING,
        model=model,
        max_context=CONTEXT,
        port=port,
        plugins=plugins,
        adapter_rank=lora.rank if lora else None,
    )
    env = {**launch.env, planted.FILE: str(folder / "fault")}
    server = await ManagedServer.start(
        "vllm", ServerJob(command=launch.command, env=env), LocalSpawner(folder), port, DEADLINE_S
    )

    async def no_check(engine: HttpEngine) -> None: ...

    engine = HttpEngine(
        "vllm",
        server,
        lambda client: vllm.detect(client, SAMPLING, (), with_adapters=lora is not None),
        health_timeout_s=60.0,
        check=no_check,
        send=in_files,
        expected=adapter_tensors(model, lora) if lora else expected_tensors(model, "float32"),
        adapter=lora is not None,
    )
    try:
        files = FilesystemSettings(folder=folder / "weights")
        async with publications(model, folder, kind="vllm", lora=lora, weights=files) as published:
            await engine.ready()
            yield published, engine
    finally:
        await engine.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))  # type: ignore[arg-type]


async def cause(published: Publications, engine: HttpEngine) -> str:
    """Of the next publication."""
    await engine.load(await published.next(), kv="keep")
    print(engine.arrival)
    assert engine.arrival is not None
    return engine.arrival.cause


def test_each_fault_is_found_at_the_first_probe_after_it_and_named(tmp_path: Path) -> None:
    async def main() -> None:
        found: dict[str, list[str]] = {}
        async with opened(tmp_path) as (published, engine):
            for fault in CAUSES:
                (tmp_path / "fault").write_text(fault)
                spoiled = await cause(published, engine)
                (tmp_path / "fault").write_text("")
                found[fault] = [spoiled, await cause(published, engine)]
        print(found)
        for fault, begin in CAUSES.items():
            assert found[fault][0].startswith(begin), fault
            assert found[fault][1] == "", fault
        assert found[""][0] == ""

    run(main)


def test_an_adapter_that_requests_do_not_name_is_found_and_named(tmp_path: Path) -> None:
    class Nameless(VllmAdapters):
        def request(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
            route, body = super().request(attempt)
            return route, body | {"model": self.model_name}

    async def main() -> None:
        async with opened(tmp_path, LORA) as (published, engine):
            assert await cause(published, engine) == ""
            dialect = engine.dialect
            assert isinstance(dialect, VllmAdapters)
            whole, dialect.__class__ = dialect.__class__, Nameless
            assert (await cause(published, engine)).startswith("adapter not active: ")
            dialect.__class__ = whole
            assert await cause(published, engine) == ""

    run(main)
