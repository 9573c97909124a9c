"""Simulated engines that die and are restarted as live ones: the lives of SupervisedEngines."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import msgspec

from tailrace.contracts.engine import TokenCounter, Usage
from tailrace.contracts.weights import Weights
from tailrace.controller.base import RunComponents
from tailrace.controller.run import Run
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.drivers.engine.supervised import SupervisedEngine, watch_engines
from tailrace.errors import EngineDied, TransferFailed
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import SimSettings
from tailrace.types import KV, Sample

START_S = 2.0


class Life:
    """An EngineProcess: one simulated engine, from its start to its death.

    Args:
        chance: one load in eight fails.
    """

    def __init__(self, engine: SimEngine, chance: random.Random) -> None:
        self.engine, self._chance = engine, chance
        self.capabilities = engine.capabilities
        self.counter, self.arrival = TokenCounter(), None
        self._num_counted = 0
        self._loaded = [0]
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, why: str = "it was killed") -> None:
        if not self._end.done():
            self._end.set_result(why)
            self.engine.die()

    async def ready(self) -> None:
        await asyncio.sleep(START_S)

    async def generate(self, sample: Sample) -> None:
        kept = self._loaded[-self.engine.versions :]
        assert sample.pin in (None, *kept), f"{sample.id} of version {sample.pin} came to a life with {kept}"
        try:
            await self.engine.generate(sample)
        finally:
            self.usage()

    async def load(self, weights: Weights, *, kv: KV) -> None:
        if self._chance.random() < 1 / 8:
            raise TransferFailed(self.engine.name)
        await self.engine.load(weights, kv=kv)
        self._loaded.append(weights.version)
        if self._end.done():
            raise EngineDied(self._end.result())

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    def usage(self) -> Usage:
        usage = self.engine.usage()
        self.counter.add(usage.num_generated - self._num_counted)
        self._num_counted = usage.num_generated
        return msgspec.structs.replace(usage, num_counted=usage.num_generated)

    async def died(self) -> str:
        return await asyncio.shield(self._end)

    async def close(self) -> None:
        self.die("it was closed")


def mortal_parts(sim: SimSettings, seed: int) -> Callable[[], RunComponents]:
    """Parts whose engines are supervised. They open when `mortality` runs beside the schedule."""

    def parts() -> RunComponents:
        simulated, chance = simulated_parts(sim, seed), random.Random(seed)

        def of(engine: SimEngine) -> SupervisedEngine:
            async def begin() -> Life:
                return Life(
                    SimEngine(engine.name, sim.engines, engine._length_of, engine._max_tokens), chance
                )

            versions = sim.engines.versions or 1
            supervised = SupervisedEngine(engine.name, engine.slots, begin, TokenCounter(), versions)
            supervised.capabilities = engine.capabilities  # a live run opens its engines first
            return supervised

        engines = [of(engine) for engine in simulated.engines if isinstance(engine, SimEngine)]
        return replace(simulated, engines=engines)

    return parts


async def mortality(parts: RunComponents, run: Run, *, kills_s: list[tuple[float, int]]) -> None:
    """Open and keep the engines, and kill the present life of one at each of the moments."""
    engines = [engine for engine in parts.engines if isinstance(engine, SupervisedEngine)]
    for engine in engines:
        await engine.open()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch_engines(engines, recovery_timeout_s=300.0))
        for at_s, number in kills_s:
            tasks.create_task(_kill(engines[number], at_s))


async def _kill(engine: SupervisedEngine, at_s: float) -> None:
    await asyncio.sleep(at_s)
    while not isinstance(life := engine._process, Life):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    life.die()
