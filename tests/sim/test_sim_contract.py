"""The simulated engine keeps the contract of engines."""

import asyncio
from collections.abc import Sequence

from helpers.engine_contract import EngineContract, Main
from helpers.virtual import EXACT
from tailrace import clock
from tailrace.contracts.engine import Engine
from tailrace.contracts.weights import Weights
from tailrace.sim.engine import SimEngine
from tailrace.types import Sample


class TestSimEngine(EngineContract):
    NUM_TOKENS = 10
    SEEDED_NOISE = True

    def drive(self, main: Main) -> None:
        async def whole() -> None:
            engines = [SimEngine(name, EXACT.engines, lambda _: self.NUM_TOKENS) for name in ("one", "other")]
            await main(*engines)

        clock.run(whole(), virtual=True)

    async def under_way(self, engine: Engine, samples: Sequence[Sample]) -> None:
        await asyncio.sleep(3.5)

    def weights(self, version: int) -> Weights:
        return Weights(version)
