"""Laps on the same footing: the same weights, prompts and seeds for every schedule, the order rotated.

Racers whose workers are set up alike share them; others are raced one after another within each repetition:
no two sets of workers ever run at once.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tailrace.commands.laps import Lap, LapMeter
from tailrace.commands.live import advantages_of, open_parts, rewind, training_prompts
from tailrace.commands.probe import probe
from tailrace.config import RunConfig
from tailrace.controller.execution import execute
from tailrace.controller.base import Parts
from tailrace.record.events import FromRound, Recorder, Sink
from tailrace.record.timeline import PICTURED_ROUNDS, Timeline
from tailrace.record.trace import TraceWriter
from tailrace.schedules.resolve import BoundSchedule

WARM_UP_ROUNDS = 2
"""Of the laps before the race, where no rounds of the counted ones are given to it."""


@dataclass(frozen=True, slots=True)
class Racer:
    """Who races, on which workers."""

    config: RunConfig
    schedule: BoundSchedule

    @property
    def setup(self) -> str:
        """What its workers are made from."""
        sections = {"model", "data", "sampling", "reward", "engine", "algorithm", "trainer", "host"}
        return json.dumps(self.config.model_dump(mode="json", include=sections), sort_keys=True)


class Arena:
    """The workers of one racer at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._setup = ""
        self._open = AsyncExitStack()
        self._parts: Parts | None = None

    async def parts(self, racer: Racer) -> Parts:
        """Its workers; those of another set-up are closed first."""
        if self._parts is None or racer.setup != self._setup:
            await self.close()
            self._parts = await self._open.enter_async_context(open_parts(racer.config, self._folder))
            self._setup = racer.setup
        return self._parts

    async def close(self) -> None:
        self._parts = None
        await self._open.aclose()


async def race(
    racers: Mapping[str, Racer], config: RunConfig, folder: Path, *, pictured: bool
) -> tuple[dict[str, list[Lap]], dict[str, list[Timeline]]]:
    """All counted laps of each racer, and what pictures of them show; none, and no traces, where nobody is
    going to look."""
    laps: dict[str, list[Lap]] = {name: [] for name in racers}
    timelines: dict[str, list[Timeline]] = {name: [] for name in racers}
    arena, setups = Arena(folder), list(dict.fromkeys(racer.setup for racer in racers.values()))
    try:
        for repeat in range(0 if config.compare.warm_up_rounds else -1, config.compare.repeats):
            for name in _in_turn(racers, repeat):
                parts = await arena.parts(racers[name])
                # The same weights; but what a trainer keeps beside them depends on its algorithm.
                start = folder / f"start-{setups.index(racers[name].setup)}"
                if not start.exists():
                    await parts.trainer.save(start)
                await rewind(parts, start, version=0)
                timeline = Timeline()
                pictures = _pictures(name, racers[name], timeline, folder) if pictured else []
                lap = await _lap(name, racers[name], parts, repeat, folder, pictures)
                if repeat >= 0:
                    laps[name].append(lap)
                    timelines[name].append(timeline)
    finally:
        await arena.close()
    return laps, timelines


def _in_turn(racers: Mapping[str, Racer], repeat: int) -> list[str]:
    """Every schedule goes first, second, ... in turn, those with the same workers side by side."""
    names = list(racers)
    turn = repeat % len(names)
    rotated = names[turn:] + names[:turn]
    setups = list(dict.fromkeys(racers[name].setup for name in rotated))
    return sorted(rotated, key=lambda name: setups.index(racers[name].setup))


def _pictures(name: str, racer: Racer, timeline: Timeline, folder: Path) -> list[Sink]:
    last = FromRound(racer.config.run.rounds - PICTURED_ROUNDS, timeline)
    return [last, TraceWriter(folder / f"trace-{name}.json")]


async def _lap(
    name: str, racer: Racer, parts: Parts, repeat: int, folder: Path, pictures: Sequence[Sink]
) -> Lap:
    config, race = racer.config, racer.config.compare
    changes = {"eval_every": 0, "checkpoint_every": race.probe_every if repeat >= 0 else 0}
    if repeat < 0:
        changes["rounds"] = min(config.run.rounds, WARM_UP_ROUNDS)
    if race.seeds == "own":
        changes["seed"] = config.run.seed + max(repeat, 0)
        parts = replace(parts, prompts=training_prompts(config, changes["seed"]))
    settings = config.run.model_copy(update=changes)
    meter = LapMeter(race.warm_up_rounds)
    checkpoints = folder / "laps" / f"{name}-{repeat}"
    await execute(
        racer.schedule,
        parts,
        settings,
        Recorder(meter, *pictures),
        compute_advantages=advantages_of(config),
        folder=checkpoints,
    )
    return meter.lap(await probe(parts, meter.checkpoints, settings), race.target_accuracy)
