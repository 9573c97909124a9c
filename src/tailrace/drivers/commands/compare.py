"""`tailrace compare`: a comparison of schedules, and its figures as a table and as numbers for scripts.

Each schedule runs from the same weights, on the same prompts, with the same seeds. Live, candidates whose
workers are made from the same settings share them. Others run one after another, so that no two sets of
workers run at the same time. In virtual time every trial has parts of its own, and each repetition has
another seed, because the same seed gives the same trial.

The bound is that of serial's rounds (`record/bounds.py`): a lower bound on the main time of a round for all
schedules that generate all of its samples in it, on the same devices. Schedules that carry samples may fall
below it. A row of its own has the bound of each schedule's own rounds.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from tailrace import clock
from tailrace.config import RunConfig, load_config, with_model_folder
from tailrace.drivers.assembly.folder import RunFolder, recorder_of
from tailrace.drivers.assembly.live import begin_start, check_live
from tailrace.drivers.assembly.running import ComparedSchedule, SharedWorkers, run_trial
from tailrace.drivers.assembly.schedule import (
    check_parameter_names,
    compared_parameters,
    resolve,
    with_published_defaults,
)
from tailrace.drivers.assembly.simulation import note_default_costs, run_virtual
from tailrace.drivers.commands.tables import check_output, open_console, print_table
from tailrace.errors import ConfigError, say
from tailrace.record.events import Recorder
from tailrace.record.figures import BIASES, COSTS, QUALITIES, TIMES, TRIAL_FIGURES, Row
from tailrace.record.summary import Summary

LIVE, VIRTUAL = "the comparison", "the comparison, in seconds of virtual time"
WARM_UP_ROUNDS = 2
"""Rounds of the live trial of each schedule that is run before the comparison and not counted."""
BASELINE = "serial"
NESTED = ("staleness", "lag", "ess")
"""Prefixes of figures that are grouped in the numbers: staleness_mean is staleness.mean."""
SPREAD = ("main_time_s", "samples_per_s")
"""Figures whose range is printed."""


def compare(
    config: Path,
    /,
    *,
    schedules: str | None = None,
    repeats: str | None = None,
    virtual: bool = False,
    output_dir: Path | None = None,
    json_path: Annotated[Path | None, Parameter("--json")] = None,
    overrides: Mapping[str, str],
) -> None:
    """Race schedules and print the table.

    Args:
        config: a TOML file.
        schedules: A,B: instead of compare.schedules.
        repeats: instead of compare.repeats.
        virtual: compare in virtual time, as a config without [model] always does. No model is needed.
        output_dir: for the files of each schedule and compare.json.
        json_path: another file for the medians.
    """
    check_output("--json", json_path)
    named = {"compare.schedules": schedules and str(schedules.split(",")), "compare.repeats": repeats}
    loaded = load_config(config, {**overrides, **{key: text for key, text in named.items() if text}})
    prices = loaded.prices and loaded.prices.unlimited  # a trial that a budget ends is not comparable
    loaded = loaded.model_copy(update={"prices": prices})
    console, folder = open_console(), output_dir
    candidates = _candidates(loaded if virtual else with_model_folder(loaded))
    if not virtual and loaded.model is None:
        console.print("the config has no [model]: the comparison is in virtual time")
        virtual = True
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    if virtual:
        comparison = compare_virtual(candidates, loaded.compare.repeats, folder)
    else:
        begin_start(loaded)
        bound = [candidate.schedule for candidate in candidates.values()]  # all run with the same threads
        fitted = {name: check_live(candidate.config, *bound) for name, candidate in candidates.items()}
        print(next(iter(fitted.values())).table, file=sys.stderr)
        candidates = {
            name: replace(candidate, config=fitted[name].config) for name, candidate in candidates.items()
        }
        with TemporaryDirectory() as scratch:
            running = compare_live(candidates, loaded.compare.repeats, folder or Path(scratch), files=folder)
            comparison = clock.run(running, virtual=False)
    print_table(console, comparison.table(VIRTUAL if virtual else LIVE, prices.currency if prices else ""))
    if virtual:
        note_default_costs(loaded.sim, console)
    if folder:
        console.print(f"files     {folder}/*/  (tailrace view {folder})")
    for path in (json_path, folder and folder / "compare.json"):
        if path:
            path.write_text(json.dumps(comparison.numbers(), indent=2) + "\n", encoding="utf-8")


# -- the comparison --------------------------------------------------------------------------------


def _candidates(config: RunConfig) -> dict[str, ComparedSchedule]:
    check_parameter_names(config, config.compare.schedules)
    candidates: dict[str, ComparedSchedule] = {}
    for name in config.compare.schedules:
        parameters, chosen = compared_parameters(config, name)
        if chosen:
            listed = ", ".join(f"{key} = {value}" for key, value in chosen.items())
            say(f"{name}: {listed}, as the config has none; [schedules.{name}] sets others")
        named = config.model_copy(update={"schedule": parameters})
        try:
            candidates[name] = ComparedSchedule(with_published_defaults(named), resolve(named))
        except ConfigError as why:
            why.args = (f"{name}: {why}",)
            raise
    return candidates


async def compare_live(
    candidates: Mapping[str, ComparedSchedule], repeats: int, folder: Path, *, files: Path | None = None
) -> "Comparison":
    """Compare on real workers, whose logs and first weights go to `folder`. The files of each candidate's
    last trial go to `files`."""
    comparison = Comparison()
    async with aclosing(SharedWorkers(folder)) as workers:
        for repeat in range(-1, repeats):
            for name in in_turn(candidates, repeat):
                candidate, rounds = candidates[name], candidates[name].config.run.rounds
                parts, (recorder, summary) = await workers.parts(candidate), _recorder(name, candidate, files)
                rounds = min(rounds, WARM_UP_ROUNDS) if repeat < 0 else rounds
                await run_trial(candidate, parts, recorder, rounds)
                if repeat >= 0:
                    comparison.add(name, summary)
    return comparison


def compare_virtual(
    candidates: Mapping[str, ComparedSchedule], repeats: int, folder: Path | None
) -> "Comparison":
    """Compare in virtual time. Repetition r has the seed run.seed + r. Files go to `folder`."""
    comparison = Comparison()
    for repeat in range(repeats):
        for name, candidate in candidates.items():
            config, (recorder, summary) = candidate.config, _recorder(name, candidate, folder)
            seeded = config.run.model_copy(update={"seed": config.run.seed + repeat})
            config = config.model_copy(update={"run": seeded})
            run_virtual(config, candidate.schedule, recorder)
            comparison.add(name, summary)
    return comparison


def in_turn(candidates: Mapping[str, ComparedSchedule], repeat: int) -> list[str]:
    """The order of a repetition: the first place rotates; candidates with the same workers are neighbours."""
    names = list(candidates)
    turn = repeat % len(names)
    rotated = names[turn:] + names[:turn]
    setups = list(dict.fromkeys(candidates[name].setup for name in rotated))
    return sorted(rotated, key=lambda name: setups.index(candidates[name].setup))


def _recorder(name: str, candidate: ComparedSchedule, folder: Path | None) -> tuple[Recorder, Summary]:
    """The files of a trial are those of a run, in a folder of the candidate's name."""
    own = RunFolder(folder / name.replace("/", "_")) if folder else None
    if own:
        own.begin_anew(candidate.config.toml())
    summary = Summary(own.summary if own else None)
    return recorder_of(own, summary), summary


# -- its figures ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """The counted trials of a comparison by the name of the schedule."""

    trials: dict[str, list[Row]] = field(default_factory=dict)

    def add(self, name: str, summary: Summary) -> None:
        self.trials.setdefault(name, []).append(summary.figures())

    @property
    def bound_s(self) -> float | None:
        """The bound on the main time of a round; None if serial did not run."""
        return self._median(BASELINE, "bound_s") if BASELINE in self.trials else None

    def numbers(self) -> dict[str, object]:
        """Medians of all figures, the range of the main time, and every trial."""
        schedules = {name: self._numbers(name) for name in self.trials}
        return {"schedules": schedules, "bound_s": self.bound_s}

    def table(self, title: str, currency: str = "") -> Table:
        """A column for each schedule, a row for each figure. A comparison without prices has no currency."""
        table = Table("medians [lowest - highest]", title=title, title_justify="left")
        for name in self.trials:
            table.add_column(name, justify="right")
        costs = {figure: (label, f"{{:,.4f}} {currency}") for figure, label in COSTS.items() if currency}
        biases = (
            BIASES
            if all("length_bias" in trial for trials in self.trials.values() for trial in trials)
            else {}
        )
        for figure, (label, form) in {**TIMES, **costs, **QUALITIES, **biases}.items():
            table.add_row(label, *(self._cell(name, figure, form) for name in self.trials))
            if figure == "main_s_per_1000_samples" and BASELINE in self.trials:
                for label, form, value in self._against_serial():
                    table.add_row(label, *(form.format(value(name)) for name in self.trials))
        if self.bound_s:
            table.caption = (
                f"bound {self.bound_s:.2f} s: the least main time for serial's samples;\n"
                "gap closed = (serial - x) / (serial - bound)"
            )
        return table

    def _against_serial(self) -> Sequence[tuple[str, str, Callable[[str], float]]]:
        """Labels, formats and values. Times are compared for the same number of samples, because rounds may
        differ in size."""

        def time_s(name: str) -> float:
            return self._median(name, "main_s_per_1000_samples")

        serial_s, rate = time_s(BASELINE), self._median(BASELINE, "samples_per_s")
        bound_s = (self.bound_s or 0.0) * serial_s / self._median(BASELINE, "main_time_s")
        rows: list[tuple[str, str, Callable[[str], float]]] = [
            ("against serial", "{:+.1%}", lambda name: time_s(name) / serial_s - 1),
            ("samples/s of serial's", "{:.2f}x", lambda name: self._median(name, "samples_per_s") / rate),
        ]
        if bound_s:
            rows.append(("over the bound", "{:+.1%}", lambda name: time_s(name) / bound_s - 1))
            if closable_s := max(0.0, serial_s - bound_s):
                rows.append(("gap closed", "{:.0%}", lambda name: (serial_s - time_s(name)) / closable_s))
        return rows

    def _numbers(self, name: str) -> dict[str, object]:
        figures: dict[str, Any] = {}
        for figure in TRIAL_FIGURES:
            values = self._values(name, figure)
            middle = float(median(values)) if values else None
            group, _, kind = figure.rpartition("_")
            if group in NESTED:
                figures.setdefault(group, {})[kind] = middle
            else:
                figures[figure] = middle
        times = self._values(name, "main_time_s")
        return figures | {
            "main_time_s_spread": [min(times), max(times)],
            "laps": [{figure: trial.get(figure) for figure in TRIAL_FIGURES} for trial in self.trials[name]],
        }

    def _values(self, name: str, figure: str) -> list[float]:
        """A figure of all trials of a schedule that have it."""
        return [trial[figure] for trial in self.trials[name] if figure in trial]

    def _median(self, name: str, figure: str) -> float:
        return float(median(self._values(name, figure)))

    def _cell(self, name: str, figure: str, form: str) -> str:
        number, _, unit = form.partition(" ")
        values = self._values(name, figure)
        middle, low, high = (number.format(value) for value in (median(values), min(values), max(values)))
        middle += unit and f" {unit}"
        return f"{middle} [{low} - {high}]" if figure in SPREAD and len(values) > 1 else middle
