"""Racing schedules: each runs from the same weights, on the same prompts, with the same seeds.

Live, racers whose workers are made from the same settings share them. Others run one after another, so that
no two sets of workers run at the same time. In virtual time every lap has parts of its own, and each
repetition has another seed, because the same seed gives the same lap."""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path

from tailrace import clock
from tailrace.assembly.folder import RunFolder
from tailrace.assembly.live import advantages_of, open_parts, rewind
from tailrace.assembly.schedule import BoundSchedule
from tailrace.assembly.simulation import run_virtual
from tailrace.config import RunConfig
from tailrace.controller.base import Parts
from tailrace.controller.execution import execute
from tailrace.record.events import Recorder, Sink
from tailrace.record.laps import Lap, LapMeter
from tailrace.record.metrics import MetricsWriter
from tailrace.record.run_log import LogWriter
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary

WARM_UP_ROUNDS = 2
"""Rounds of the live lap of each schedule that is run before the race and not counted."""


@dataclass(frozen=True, slots=True)
class Racer:
    """A schedule, and the config that its workers are made from."""

    config: RunConfig
    schedule: BoundSchedule

    @property
    def setup(self) -> str:
        """The settings that worker processes are made from."""
        sections = {
            "model",
            "data",
            "sampling",
            "reward",
            "engine",
            "algorithm",
            "trainer",
            "host",
            "placement",
        }
        return json.dumps(self.config.model_dump(mode="json", include=sections), sort_keys=True)


@dataclass(slots=True)
class Measured:
    """The counted laps of each racer."""

    laps: dict[str, list[Lap]] = field(default_factory=dict)

    def add(self, name: str, meter: LapMeter) -> None:
        self.laps.setdefault(name, []).append(meter.lap())


class Arena:
    """The workers of one racer at a time, always at the weights that training starts from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._setup = ""
        self._open = AsyncExitStack()
        self._parts: Parts | None = None

    async def parts(self, racer: Racer) -> Parts:
        """The workers of a racer, rewound. Workers of another set-up are closed first."""
        if self._parts is None or racer.setup != self._setup:
            await self.aclose()
            self._parts = await self._open.enter_async_context(open_parts(racer.config, self._folder))
            self._setup = racer.setup
            # For each set-up anew: what a trainer keeps beside the weights depends on its algorithm.
            await (await self._parts.trainer.save(self._folder / "start"))
        await rewind(self._parts, self._folder / "start", version=0)
        return self._parts

    async def aclose(self) -> None:
        self._parts = None
        await self._open.aclose()


async def race_live(
    racers: Mapping[str, Racer], repeats: int, folder: Path, *, with_files: bool = False
) -> Measured:
    """Race on real workers, whose logs and first weights go to the folder.

    Args:
        with_files: whether to write the files of each racer's last lap.
    """
    measured = Measured()
    async with aclosing(Arena(folder)) as arena:
        for repeat in range(-1, repeats):
            for name in in_turn(racers, repeat):
                racer = racers[name]
                settings = racer.config.run.model_copy(update={"eval_every": 0, "checkpoint_every": 0})
                if repeat < 0:
                    rounds = min(settings.rounds, WARM_UP_ROUNDS)
                    settings = settings.model_copy(update={"rounds": rounds})
                meter = LapMeter()
                await execute(
                    racer.schedule,
                    await arena.parts(racer),
                    settings,
                    _recorder(name, racer, meter, folder if with_files else None),
                    compute_advantages=advantages_of(racer.config),
                )
                if repeat >= 0:
                    measured.add(name, meter)
    return measured


def race_virtual(racers: Mapping[str, Racer], repeats: int, folder: Path | None) -> Measured:
    """Race in virtual time. Repetition r of every racer has the seed run.seed + r. Files go to `folder`."""
    measured = Measured()
    for repeat in range(repeats):
        for name, racer in racers.items():
            meter = LapMeter()
            seeded = racer.config.run.model_copy(update={"seed": racer.config.run.seed + repeat})
            config = racer.config.model_copy(update={"run": seeded})
            run_virtual(config, racer.schedule, _recorder(name, racer, meter, folder))
            measured.add(name, meter)
    return measured


def in_turn(racers: Mapping[str, Racer], repeat: int) -> list[str]:
    """The order of a repetition: the first place rotates, and racers with the same workers are neighbours."""
    names = list(racers)
    turn = repeat % len(names)
    rotated = names[turn:] + names[:turn]
    setups = list(dict.fromkeys(racers[name].setup for name in rotated))
    return sorted(rotated, key=lambda name: setups.index(racers[name].setup))


def _recorder(name: str, racer: Racer, meter: LapMeter, folder: Path | None) -> Recorder:
    """The files of a lap are those of a run, in a folder of the racer's name."""
    sinks: list[Sink] = [meter]
    if folder:
        own = RunFolder(folder / name.replace("/", "_"))
        own.begin_anew(racer.config.toml())
        sinks += [MetricsWriter(own.metrics), LogWriter(own.events), Summary(own.summary)]
    return Recorder(StepMeter(*sinks, wall_clock=clock.wall_time))
