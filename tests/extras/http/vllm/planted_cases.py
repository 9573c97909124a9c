"""A trainer, and a vLLM server that spoils what it is told to."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import planted
from vllm_cases import CONTEXT, DEADLINE_S, SETTINGS, in_files

from helpers.faults import SAMPLING, Publications, publications
from helpers.tiny_models import save_tiny_model
from tailrace.contracts.trainer import LoraSettings
from tailrace.drivers.trainer.adapter import adapter_tensors
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.drivers.weights.settings import FilesystemSettings
from tailrace.drivers.weights.transfers import Transfers
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.extras.http import vllm
from tailrace.extras.http.engine import HttpEngine
from tailrace.extras.http.server import ManagedServer, ServerJob, free_port
from tailrace.extras.http.vllm import write_plugin

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
        adapter=lora,
    )
    env = {**launch.env, planted.FILE: str(folder / "fault")}
    server = await ManagedServer.start(
        "vllm", ServerJob(command=launch.command, env=env), LocalSpawner(folder), port, DEADLINE_S
    )

    async def no_check(engine: HttpEngine) -> None: ...

    engine = HttpEngine(
        "vllm",
        server,
        lambda client: vllm.detect(client, SAMPLING, (), num_adapters=1 if lora else 0),
        health_timeout_s=60.0,
        check=no_check,
        transfers=Transfers(in_files),
        expected=adapter_tensors(model, lora) if lora else expected_tensors(model, "float32"),
        decode=str,
        adapter=lora is not None,
    )
    try:
        files = FilesystemSettings(folder=folder / "weights")
        async with publications(model, folder, kind="vllm", lora=lora, weights=files) as published:
            await engine.ready()
            yield published, engine
    finally:
        await engine.close()


async def cause(published: Publications, engine: HttpEngine) -> str:
    """Of the next publication."""
    await engine.load(await published.next(), kv="keep")
    print(engine.arrival)
    assert engine.arrival is not None
    return engine.arrival.cause


async def causes(folder: Path) -> dict[str, tuple[str, str]]:
    """Of the publication with each fault, and of the one after it."""
    found = {}
    async with opened(folder) as (published, engine):
        for fault in CAUSES:
            (folder / "fault").write_text(fault)
            spoiled = await cause(published, engine)
            (folder / "fault").write_text("")
            found[fault] = spoiled, await cause(published, engine)
    return found
