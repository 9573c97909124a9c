"""`tailrace compare`: a fair race between schedules.

Every schedule starts from the same weights, on the same prompts, with the same seeds, on the same
worker processes; the repetitions alternate, and one before them is run and not counted. The bound is what
no schedule that generates with these weights can beat: max(rollout alone, t_first + trainer compute), where
the rollout alone is serial's, and t_first is the time of the first U groups served alone.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from tailrace import clock
from tailrace.commands.live import open_parts, rewind
from tailrace.config import RunConfig, require_sections
from tailrace.record.events import Recorder
from tailrace.record.rounds import RoundMeter
from tailrace.record.timeline import Timeline, draw
from tailrace.record.trace import TraceWriter
from tailrace.run import Run, drive
from tailrace.schedules.resolve import BoundSchedule, resolve, shared_parameters

BASELINE = "serial"
FIRST_GROUPS = "first-groups"


@dataclass(frozen=True, slots=True)
class Lap:
    """One schedule in one repetition: means over its rounds."""

    main_time_s: float
    waiting_ratio: float
    first_dispatch_s: float
    trainer_compute_s: float
    rollout_time_s: float
    reward: float

    @classmethod
    def of(cls, meter: RoundMeter) -> "Lap":
        rounds = meter.reports
        return cls(
            main_time_s=fmean(report.main_time_s for report in rounds),
            waiting_ratio=fmean(report.waiting_ratio for report in rounds),
            first_dispatch_s=fmean(report.first_dispatch_s for report in rounds),
            trainer_compute_s=fmean(report.trainer_compute_s for report in rounds),
            rollout_time_s=fmean(report.rollout_time_s or 0.0 for report in rounds),
            reward=fmean(report.reward for report in rounds),
        )


async def first_groups(run: Run, U: int) -> None:
    """The first U groups served alone: the earliest that a trainer can have work."""
    run.promise(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(U))
        await run.train(await run.pool.take(U))
        await run.publish()


def compare(
    config: RunConfig,
    names: Sequence[str],
    *,
    repeats: int,
    folder: Path | None = None,
    json_path: Path | None = None,
) -> None:
    """Race schedules; print the table, and leave pictures, traces and numbers where asked.

    Raises:
        ConfigError: a schedule is unknown, or its parameters cannot work.
    """
    require_sections(config, "model", "data", "sampling")
    racers: dict[str, BoundSchedule] = {
        name: resolve(config.model_copy(update={"schedule": shared_parameters(config, name)}))
        for name in names
    }
    if U := _groups_a_step(racers.values()):
        racers[FIRST_GROUPS] = partial(first_groups, U=U)
    with TemporaryDirectory() as scratch:
        results = clock.run(_race(config, racers, repeats, folder or Path(scratch)), virtual=False)
    console = Console()
    console.print(results.table())
    if folder:
        console.print(
            f"timeline  {folder / 'timeline.png'}", f"traces    {folder / 'trace-*.json'}", sep="\n"
        )
    for path in (json_path, folder and folder / "compare.json"):
        if path:
            path.write_text(json.dumps(results.numbers(), indent=2) + "\n")


def _groups_a_step(racers: Iterable[BoundSchedule]) -> int | None:
    """U, where a racer steps at U groups."""
    return next((racer.keywords["U"] for racer in racers if "U" in racer.keywords), None)


async def _race(
    config: RunConfig, racers: Mapping[str, BoundSchedule], repeats: int, folder: Path
) -> "Results":
    settings = config.run.model_copy(update={"eval_every": 0, "checkpoint_every": 0})
    laps: dict[str, list[Lap]] = {name: [] for name in racers}
    timelines: dict[str, list[Timeline]] = {name: [] for name in racers}
    start = folder / "start"
    async with open_parts(config, folder) as parts:
        await parts.trainer.save(start)
        for repeat in range(-1, repeats):  # the first is a warm-up
            for name in _rotated(list(racers), repeat):
                meter, timeline = RoundMeter(), Timeline()
                trace = TraceWriter(folder / f"trace-{name}.json")
                await rewind(parts, start, version=0)
                await drive(racers[name], parts, settings, Recorder(meter, timeline, trace))
                if repeat >= 0:
                    laps[name].append(Lap.of(meter))
                    timelines[name].append(timeline)
    results = Results(laps)
    pictured = {name: timelines[name][results.typical(name)] for name in results.racers}
    draw(pictured, folder / "timeline.png")
    return results


def _rotated(names: list[str], repeat: int) -> list[str]:
    """Every schedule goes first, second, ... in turn."""
    turn = repeat % len(names)
    return names[turn:] + names[:turn]


@dataclass(frozen=True, slots=True)
class Results:
    """All laps of a race."""

    laps: Mapping[str, Sequence[Lap]]

    def median(self, name: str, figure: str) -> float:
        return float(median(getattr(lap, figure) for lap in self.laps[name]))

    def typical(self, name: str) -> int:
        """The repetition whose main time is nearest to the median: the one to look at."""
        times = [lap.main_time_s for lap in self.laps[name]]
        return min(range(len(times)), key=lambda repeat: abs(times[repeat] - median(times)))

    @property
    def bound_s(self) -> float | None:
        """max(rollout alone, t_first + trainer compute); None without serial or steps of U groups."""
        if BASELINE not in self.laps or FIRST_GROUPS not in self.laps:
            return None
        first_s = self.median(FIRST_GROUPS, "first_dispatch_s")
        compute_s = self.median(BASELINE, "trainer_compute_s")
        return max(self.median(BASELINE, "rollout_time_s"), first_s + compute_s)

    def numbers(self) -> dict[str, object]:
        """For scripts: medians, with their spread beside them."""
        figures = [figure.name for figure in fields(Lap)]
        schedules = {
            name: {figure: self.median(name, figure) for figure in figures}
            | {"main_time_s_spread": [min(times), max(times)]}
            for name in self.racers
            if (times := [lap.main_time_s for lap in self.laps[name]])
        }
        numbers: dict[str, object] = {"schedules": schedules, "bound_s": self.bound_s}
        if FIRST_GROUPS in self.laps:
            numbers["first_groups_alone_s"] = self.median(FIRST_GROUPS, "first_dispatch_s")
        return numbers

    def table(self) -> Table:
        """A column a schedule, a row a figure."""
        table = Table("medians [lowest - highest]", title="the race", title_justify="left")
        for name in self.racers:
            table.add_column(name, justify="right")
        for label, cell in self._rows():
            table.add_row(label, *(cell(name) for name in self.racers))
        if self.bound_s is not None:
            first_s = self.median(FIRST_GROUPS, "first_dispatch_s")
            table.caption = (
                f"bound {self.bound_s:.2f} s = max(rollout alone, first U groups alone {first_s:.2f} s\n"
                "+ trainer compute); gap closed = (serial - x) / (serial - bound)"
            )
        return table

    @property
    def racers(self) -> list[str]:
        """The schedules that were asked for."""
        return [name for name in self.laps if name != FIRST_GROUPS]

    def _rows(self) -> list[tuple[str, Callable[[str], str]]]:
        def seconds(figure: str) -> Callable[[str], str]:
            return lambda name: f"{self.median(name, figure):.2f} s"

        rows: list[tuple[str, Callable[[str], str]]] = [("main time", self._main_time)]
        if BASELINE in self.laps:
            serial_s = self.median(BASELINE, "main_time_s")
            rows.append(("against serial", lambda name: f"{self._main_s(name) / serial_s - 1:+.1%}"))
        if (bound_s := self.bound_s) is not None:
            closable_s = serial_s - bound_s
            rows.append(("gap closed", lambda name: f"{(serial_s - self._main_s(name)) / closable_s:.0%}"))
            rows.append(("over the bound", lambda name: f"{self._main_s(name) / bound_s - 1:+.1%}"))
        return [
            *rows,
            ("waiting ratio", lambda name: f"{self.median(name, 'waiting_ratio'):.3f}"),
            ("first dispatch", seconds("first_dispatch_s")),
            ("trainer compute", seconds("trainer_compute_s")),
            ("rollout", seconds("rollout_time_s")),
            ("reward", lambda name: f"{self.median(name, 'reward'):.3f}"),
        ]

    def _main_s(self, name: str) -> float:
        return self.median(name, "main_time_s")

    def _main_time(self, name: str) -> str:
        times = [lap.main_time_s for lap in self.laps[name]]
        return f"{median(times):.2f} s [{min(times):.2f} - {max(times):.2f}]"
