"""A simulated trainer: time, a step counter, and the samples whose gradients are held."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

from tailrace.errors import CheckpointError
from tailrace.sim.settings import SimTrainerSettings
from tailrace.trainer.base import StepStats
from tailrace.types import Sample
from tailrace.weights.base import Weights

STEPS_FILE = "steps.txt"


class SimTrainer:
    """Keeps the contract of `trainer.base.Trainer`, made of time."""

    def __init__(self, cost: SimTrainerSettings) -> None:
        self._cost = cost
        self._held: list[Sample] = []
        self._busy_s = 0.0
        self._num_steps = 0
        self._one_after_another = asyncio.Lock()

    async def accumulate(self, units: Sequence[Sequence[Sample]], *, version: int) -> None:
        samples = [sample for unit in units for sample in unit]
        await self._work(_num_positions(samples) / self._cost.tokens_per_s)
        self._held += samples

    async def step(self) -> StepStats:
        await self._work(self._cost.step_s)
        held, self._held = self._held, []
        busy_s, self._busy_s = self._busy_s, 0.0
        self._num_steps += 1
        return StepStats(
            num_steps=self._num_steps,
            samples=tuple(sample.id for sample in held),
            num_tokens=sum(sample.num_tokens for sample in held),
            compute_s=busy_s,
        )

    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        """A model of it: log-weights of variance (drift * age)^2, a third of a training pass."""
        samples = [sample for unit in units for sample in unit]
        await self._work(_num_positions(samples) / self._cost.tokens_per_s / 3)
        spans = [span for sample in samples for span in sample.spans]
        squares = sum(
            span.num_tokens * math.exp((self._cost.drift * (version - span.version)) ** 2) for span in spans
        )
        return sum(span.num_tokens for span in spans) / squares

    async def publish(self, version: int) -> Weights:
        async with self._one_after_another:
            await asyncio.sleep(self._cost.publish_s)
        return Weights(version)

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STEPS_FILE).write_text(str(self._num_steps))

    async def restore(self, folder: Path) -> None:
        try:
            self._num_steps = int((folder / STEPS_FILE).read_text())
        except (FileNotFoundError, ValueError):
            raise CheckpointError(f"{folder / STEPS_FILE} cannot be read; remove {folder}") from None

    async def _work(self, seconds: float) -> None:
        async with self._one_after_another:
            await asyncio.sleep(seconds)
        self._busy_s += seconds


def _num_positions(samples: Sequence[Sample]) -> int:
    return sum(sample.num_tokens + len(sample.prompt.ids) for sample in samples)
