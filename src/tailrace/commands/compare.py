"""`tailrace compare`: a fair race between schedules, as a table and as numbers.

Every schedule starts from the same weights, on the same prompts, with the same seeds (race.py). Where a step
takes U groups, the bound is what no schedule that generates with a round's weights can beat: max(rollout
alone, t_first + trainer compute). The rollout alone is serial's; t_first is the time of the first U groups
served alone.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from tailrace import clock
from tailrace.commands.laps import Lap
from tailrace.commands.race import Racer, race
from tailrace.config import RunConfig, require_sections
from tailrace.errors import ConfigError
from tailrace.record.timeline import draw
from tailrace.controller.run import Run
from tailrace.schedules.resolve import check_parameter_names, resolve, shared_parameters

BASELINE = "serial"
FIRST_GROUPS = "first-groups"


async def first_groups(run: Run, U: int) -> None:
    """The first U groups served alone: the earliest that a trainer can have work."""
    run.promise(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(U))
        await run.train(await run.pool.take(U))
        await run.publish()


def compare(config: RunConfig, *, folder: Path | None = None, json_path: Path | None = None) -> None:
    """Race schedules; print the table, and leave pictures, traces and numbers where asked.

    Raises:
        ConfigError: a schedule is unknown, or its parameters cannot work.
    """
    require_sections(config, "model", "data", "sampling")
    compared = [name for name in config.compare.schedules if name not in config.variants]
    check_parameter_names(config, compared)
    racers = {name: _racer(config, name) for name in config.compare.schedules}
    if config.run.rounds == 1 and (U := _groups_a_step(racers.values())):
        racers[FIRST_GROUPS] = Racer(config, partial(first_groups, U=U))
    with TemporaryDirectory() as scratch:
        where = folder or Path(scratch)
        laps, timelines = clock.run(race(racers, config, where, pictured=folder is not None), virtual=False)
        results = Results(laps)
        if folder:
            typical = {name: timelines[name][results.typical(name)] for name in results.racers}
            draw(typical, folder / "timeline.png")
    console = Console()
    console.print(results.table())
    if folder:
        console.print(f"pictures  {folder}/timeline.png", f"traces    {folder}/trace-*.json", sep="\n")
    for path in (json_path, folder and folder / "compare.json"):
        if path:
            path.write_text(json.dumps(results.numbers(), indent=2) + "\n")


def _racer(config: RunConfig, name: str) -> Racer:
    """A variant of the config, or the config with another schedule."""
    if name in config.variants:
        config = config.variant(name)
    else:
        config = config.model_copy(update={"schedule": shared_parameters(config, name)})
    warm_up, rounds = config.compare.warm_up_rounds, config.run.rounds
    if warm_up >= rounds:
        remedy = f"choose fewer than run.rounds = {rounds}"
        raise ConfigError("compare.warm_up_rounds", warm_up, f"no round of {name} counts", remedy)
    return Racer(config, resolve(config))


def _groups_a_step(racers: Iterable[Racer]) -> int | None:
    """U, where a racer steps at U groups."""
    return next((racer.schedule.keywords["U"] for racer in racers if "U" in racer.schedule.keywords), None)


@dataclass(frozen=True, slots=True)
class Results:
    """All laps of a race."""

    laps: Mapping[str, Sequence[Lap]]

    def values(self, name: str, figure: str) -> list[float]:
        """Of all laps that have it."""
        values = (getattr(lap, figure) for lap in self.laps[name])
        return [value for value in values if value is not None]

    def median(self, name: str, figure: str) -> float | None:
        values = self.values(name, figure)
        return float(median(values)) if values else None

    def typical(self, name: str) -> int:
        """The repetition whose main time is nearest to the median: the one to look at."""
        times = self.values(name, "main_time_s")
        return min(range(len(times)), key=lambda repeat: abs(times[repeat] - median(times)))

    @property
    def bound_s(self) -> float | None:
        """max(rollout alone, t_first + trainer compute); None without serial or steps of U groups."""
        if BASELINE not in self.laps or FIRST_GROUPS not in self.laps:
            return None
        first_s = median(self.values(FIRST_GROUPS, "first_dispatch_s"))
        compute_s = median(self.values(BASELINE, "trainer_compute_s"))
        return max(median(self.values(BASELINE, "rollout_time_s")), first_s + compute_s)

    def numbers(self) -> dict[str, object]:
        """For scripts: medians, with their spread and every lap beside them."""
        schedules = {name: self._numbers(name) for name in self.racers}
        numbers: dict[str, object] = {"schedules": schedules, "bound_s": self.bound_s}
        if FIRST_GROUPS in self.laps:
            numbers["first_groups_alone_s"] = self.median(FIRST_GROUPS, "first_dispatch_s")
        return numbers

    def _numbers(self, name: str) -> dict[str, object]:
        figures: dict[str, object] = {}
        for figure in (field.name for field in fields(Lap)):
            group, _, kind = figure.rpartition("_")
            if group in NESTED:
                nested = figures.setdefault(group, {})
                assert isinstance(nested, dict)
                nested[kind] = self.median(name, figure)
            else:
                figures[figure] = self.median(name, figure)
        times = self.values(name, "main_time_s")
        return figures | {
            "main_time_s_spread": [min(times), max(times)],
            "laps": [asdict(lap) for lap in self.laps[name]],
        }

    def table(self) -> Table:
        """A column a schedule, a row a figure."""
        table = Table("medians [lowest - highest]", title="the race", title_justify="left")
        for name in self.racers:
            table.add_column(name, justify="right")
        for label, cell in self._rows():
            cells = [cell(name) for name in self.racers]
            if any(cells):
                table.add_row(label, *cells)
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
        def row(label: str, figure: str, form: str) -> tuple[str, Callable[[str], str]]:
            return label, lambda name: form.format(*values) if (values := self._figure(name, figure)) else ""

        return [
            ("main time", lambda name: self._spread(name, "main_time_s", "{:.2f}", " s")),
            *self._against_serial(),
            row("waiting ratio", "waiting_ratio", "{:.3f}"),
            row("first dispatch", "first_dispatch_s", "{:.2f} s"),
            row("trainer compute", "trainer_compute_s", "{:.2f} s"),
            row("rollout", "rollout_time_s", "{:.2f} s"),
            row("reward", "reward", "{:.3f}"),
            ("samples/s", lambda name: self._spread(name, "samples_per_s", "{:.1f}")),
            row("tokens/s", "tokens_per_s", "{:,.0f}"),
            row("rollout tokens/s", "rollout_tokens_per_s", "{:,.0f}"),
            row("staleness, mean", "staleness_mean", "{:.2f}"),
            row("staleness, max", "staleness_max", "{:.0f}"),
            row("ESS", "ess_mean", "{:.3f}"),
            row("carried tokens", "carried_tokens", "{:.1%}"),
            row("carried samples", "carried_samples", "{:.1%}"),
            row("wasted tokens", "waste_share", "{:.1%}"),
            row("length bias", "length_bias", "{:+.1%}"),
            row("time to the target", "time_to_reward_s", "{:.1f} s"),
        ]

    def _figure(self, name: str, figure: str) -> list[float]:
        value = self.median(name, figure)
        return [] if value is None else [value]

    def _against_serial(self) -> list[tuple[str, Callable[[str], str]]]:
        if BASELINE not in self.laps:
            return []
        serial_s = self._main_s(BASELINE)
        rows: list[tuple[str, Callable[[str], str]]] = [
            ("against serial", lambda name: f"{self._main_s(name) / serial_s - 1:+.1%}")
        ]
        if (bound_s := self.bound_s) is not None:
            closable_s = serial_s - bound_s
            rows.append(("gap closed", lambda name: f"{(serial_s - self._main_s(name)) / closable_s:.0%}"))
            rows.append(("over the bound", lambda name: f"{self._main_s(name) / bound_s - 1:+.1%}"))
        return rows

    def _main_s(self, name: str) -> float:
        return float(median(self.values(name, "main_time_s")))

    def _spread(self, name: str, figure: str, form: str, unit: str = "") -> str:
        values = self.values(name, figure)
        middle, low, high = (form.format(value) for value in (median(values), min(values), max(values)))
        return f"{middle}{unit} [{low} - {high}]"


NESTED = ("staleness", "ess")
"""Figures that are grouped in the numbers: staleness_mean is staleness.mean."""
