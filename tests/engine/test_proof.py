"""Each fault in the way of weights is found by the first probe after it and named, by an embedded engine in
its process; and what a prover makes of answers."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from helpers.faults import (
    ADAPTER_FAULTS,
    FAULTS,
    LORA,
    SAMPLING,
    PlantedEngine,
    PlantedJob,
    publications,
)
from helpers.tiny_models import save_tiny_model
from tailrace.engine.base import Arrival
from tailrace.engine.settings import NativeEngineSettings
from tailrace.workers.engine import RemoteEngine
from tailrace.workers.process import LocalSpawner

DEADLINE_S = 90.0


async def arrivals(model: Path, folder: Path, fault: str) -> list[Arrival]:
    """Of four publications, of which the third is spoiled."""
    adapter = LORA if fault in ADAPTER_FAULTS else None
    job = PlantedJob(
        model=model, engine=NativeEngineSettings(), sampling=SAMPLING, adapter=adapter, fault=fault
    )
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


@pytest.mark.parametrize("fault", [*FAULTS, *ADAPTER_FAULTS])
def test_a_fault_is_found_at_the_first_probe_after_it_and_named(fault: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    found = asyncio.run(asyncio.wait_for(arrivals(tmp_path / "model", tmp_path, fault), DEADLINE_S))
    print(*found, sep="\n")
    expected = {**FAULTS, **ADAPTER_FAULTS}[fault]
    assert [each.cause[: len(expected)] for each in found] == ["", "", expected, ""]
