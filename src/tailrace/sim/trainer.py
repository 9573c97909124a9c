"""A simulated trainer, with a model of the ESS and the KL, and a simulated reference model."""

import asyncio
import math
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Literal

from tailrace.clock import now
from tailrace.contracts.trainer import StepStats
from tailrace.contracts.weights import Weights
from tailrace.errors import CheckpointError, ScheduleError
from tailrace.sim.engine import SimEngine
from tailrace.sim.host import Host
from tailrace.sim.settings import SimReferenceSettings, SimTrainerSettings
from tailrace.types import Sample

Awake = Literal["asleep", "early", "whole"]
STEPS_FILE = "steps.txt"


class SimTrainer:
    """A `Trainer` that takes virtual time.

    Args:
        replicas: each has the same share of the speed.
        host: what slows it down while others work; None: it has devices of its own.
        asleep: it begins asleep, because engines have its devices.
    """

    def __init__(
        self, cost: SimTrainerSettings, replicas: int = 1, host: Host | None = None, *, asleep: bool = False
    ) -> None:
        self._cost, self.replicas = cost, replicas
        self._host = host
        self._accumulated: list[Sample] = []
        self._log_weights: list[tuple[int, float]] = []  # tokens, and the variance of their log-weights
        self._busy_s = 0.0
        self._num_steps = 0
        self._awake: Awake = "asleep" if asleep else "whole"
        self._one_after_another = asyncio.Lock()
        self.checkpoint_steps = 1  # optimizer steps between two checkpoints
        self._unsaved_s, self._num_deaths, self._back_s = 0.0, 0, 0.0

    def die(self, restart_s: float, engines: Sequence[SimEngine] = ()) -> float:
        """End it, and engines with it. New processes compute again what was computed since the newest
        checkpoint, and the call under way. Return the seconds until they have done the former."""
        for engine in engines:
            engine.fail(restart_s)
        self._num_deaths += 1
        self._back_s = now() + restart_s + self._unsaved_s
        return restart_s + self._unsaved_s

    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        samples = [sample for unit in units for sample in unit]
        self._check("accumulate", self._awake != "asleep")
        rate = self._cost.tokens_per_s * (replicas or self.replicas) / self.replicas
        await self._work(self._cost.pass_s + self._compute_s(samples, rate))
        self._accumulated += samples
        self._log_weights += self._variances(samples, version)

    async def step(self) -> StepStats:
        self._check("step", self._awake == "whole")
        await self._work(self._cost.step_s)
        samples, self._accumulated = self._accumulated, []
        log_weights, self._log_weights = self._log_weights, []
        busy_s, self._busy_s = self._busy_s, 0.0
        self._num_steps += 1
        self._unsaved_s *= self._num_steps % self.checkpoint_steps > 0
        return StepStats(
            num_steps=self._num_steps,
            samples=tuple(sample.id for sample in samples),
            num_tokens=sum(sample.num_loss_tokens for sample in samples),
            compute_s=busy_s,
            kl=_kl(log_weights),
            ess=_ess(log_weights),
        )

    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        samples = [sample for unit in units for sample in unit]
        # A forward pass is a third of a training pass.
        await self._work(self._compute_s(samples, self._cost.tokens_per_s) / 3)
        return _ess(self._variances(samples, version))

    def _compute_s(self, samples: Sequence[Sample], rate: float) -> float:
        """Return the seconds of forward and backward. `rate`: tokens_per_s of the replicas that work."""
        sequences = [sample.num_sequence_tokens for sample in samples if sample.num_loss_tokens]
        squares_s = self._cost.attention_s * sum(num**2 for num in sequences)
        return sum(sequences) / rate + squares_s * (self._cost.tokens_per_s / rate)

    def _variances(self, samples: Sequence[Sample], version: int) -> list[tuple[int, float]]:
        """Tokens in the loss, by span, and the variance of their log importance weights: (drift * age)^2."""
        spans = [span for sample in samples for span in sample.loss_spans]
        return [(span.num_tokens, (self._cost.drift * (version - span.version)) ** 2) for span in spans]

    async def publish(self, version: int) -> Weights:
        async with self._one_after_another:
            await self._started_again()
            await asyncio.sleep(self._cost.publish_s)
        return Weights(version)

    async def sleep(self) -> None:
        await self._switch("asleep")

    async def wake(self, replicas: int | None = None) -> None:
        if replicas is None or self._awake == "asleep":
            await self._switch("whole" if replicas is None else "early")

    async def _switch(self, awake: Awake) -> None:
        """Move what differs between two states, over the links of all devices at once."""
        cost = self._cost
        seconds = {"asleep": 0.0, "early": cost.early_swap_s, "whole": cost.swap_s}
        before, self._awake = self._awake, awake
        if moved_s := abs(seconds[awake] - seconds[before]):
            async with self._one_after_another:
                await asyncio.sleep(moved_s)

    def _check(self, verb: str, can: bool) -> None:
        if not can:
            raise ScheduleError(f"{verb}: the trainer is asleep, because engines generate on its devices")

    async def save(self, folder: Path) -> Awaitable[None]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STEPS_FILE).write_text(str(self._num_steps), encoding="utf-8")
        complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        complete.set_result(None)
        return complete

    async def retire(self, older: Sequence[Path], newest: Path) -> None:
        for folder in older:
            (folder / STEPS_FILE).unlink(missing_ok=True)

    async def restore(self, folder: Path) -> None:
        try:
            self._num_steps = int((folder / STEPS_FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            raise CheckpointError(f"{folder / STEPS_FILE} cannot be read; remove {folder}") from None

    async def _work(self, seconds: float) -> None:
        num_deaths = None
        async with self._one_after_another:
            while num_deaths != self._num_deaths:
                num_deaths = await self._started_again()
                if self._host:
                    took_s = await self._host.work("trainer", seconds)
                else:
                    await asyncio.sleep(took_s := seconds)
        self._busy_s += took_s
        self._unsaved_s += took_s

    async def _started_again(self) -> int:
        """Wait until it is not dead. Return how often it died."""
        if (rest_s := self._back_s - now()) > 0:
            await asyncio.sleep(rest_s)
        return self._num_deaths


def _ess(log_weights: Sequence[tuple[int, float]]) -> float:
    """(sum w)^2 / (N sum w^2) of lognormal weights with mean 1 and these variances of their logarithm."""
    num_tokens = sum(count for count, _ in log_weights)
    squares = sum(count * math.exp(min(variance, 700.0)) for count, variance in log_weights)
    return num_tokens / squares if num_tokens else 1.0


def _kl(log_weights: Sequence[tuple[int, float]]) -> float:
    """KL(mu || pi) = -E[log w] of the same weights: half the variance, mean over the tokens."""
    num_tokens = sum(count for count, _ in log_weights)
    return sum(count * variance / 2 for count, variance in log_weights) / max(1, num_tokens)


class SimReference:
    """A `Reference` that takes virtual time."""

    def __init__(self, cost: SimReferenceSettings) -> None:
        self._cost = cost
        self._device = asyncio.Lock()

    async def logprobs(self, sample: Sample) -> list[float]:
        async with self._device:
            await asyncio.sleep(sample.num_sequence_tokens / self._cost.tokens_per_s)
        return []  # simulated samples have no token ids
