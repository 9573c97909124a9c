"""Trials of `compare` and `diagnose`: short runs of schedules, on workers that they share."""

import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tailrace.algo.advantages import ComputeAdvantages
from tailrace.config import LiveConfig, RunConfig
from tailrace.controller.base import RunComponents
from tailrace.controller.execution import execute
from tailrace.drivers.assembly.open import open_parts
from tailrace.drivers.assembly.resumption import on_devices_of_trainer, rewind
from tailrace.drivers.assembly.schedule import BoundSchedule
from tailrace.drivers.assembly.simulated import failure_limit
from tailrace.record.events import Recorder


@dataclass(frozen=True, slots=True)
class BoundRun:
    """A schedule, and the config that its workers are made from."""

    config: RunConfig
    schedule: BoundSchedule

    @property
    def setup(self) -> str:
        """The settings that worker processes are made from."""
        sections = "model data sampling reward engine algorithm trainer host placement"
        return json.dumps(self.config.model_dump(mode="json", include=set(sections.split())), sort_keys=True)


class SharedWorkers:
    """The workers of one candidate at a time, always at the weights that training starts from: those of a
    checkpoint, or of the model."""

    def __init__(self, folder: Path, checkpoint: Path | None = None) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self.start = checkpoint or folder / "start"
        self._setup = ""
        self._open = AsyncExitStack()
        self._parts: RunComponents | None = None

    async def parts(self, candidate: BoundRun) -> RunComponents:
        """The workers of a candidate, rewound. Workers of another set-up are closed first."""
        if self._parts is None or candidate.setup != self._setup:
            await self.aclose()
            config = LiveConfig.of(candidate.config)
            self._parts = await self._open.enter_async_context(open_parts(config, self._folder))
            self._setup = candidate.setup
            if not self._checkpoint:  # for each set-up: a trainer with another algorithm keeps other things
                async with on_devices_of_trainer(self._parts):
                    await (await self._parts.trainer.save(self.start))
        await rewind(self._parts, self.start, version=0)
        return self._parts

    async def aclose(self) -> None:
        self._parts = None
        await self._open.aclose()


async def run_trial(candidate: BoundRun, parts: RunComponents, recorder: Recorder, rounds: int) -> None:
    """Run a schedule on given workers, without evaluations and checkpoints."""
    config, schedule = LiveConfig.of(candidate.config), candidate.schedule
    settings = config.run.changed(eval_every=0, checkpoint_every=0, rounds=rounds)
    parts = replace(parts, max_failures=failure_limit(config, schedule))
    advantages = ComputeAdvantages(config.algorithm, config.sampling)
    await execute(schedule, parts, settings, recorder, compute_advantages=advantages)
