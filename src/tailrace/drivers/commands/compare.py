"""`tailrace compare`: a comparison of schedules, and its figures as a table and as numbers for scripts.

Each schedule runs from the same weights, on the same prompts, with the same seeds. Live, candidates whose
workers are made from the same settings share them. Others run one after another, so that no two sets of
workers run at the same time. In virtual time every trial has parts of its own, and each repetition has
another seed, because the same seed gives the same trial.

Candidates make as many optimizer steps on as many samples. The bound in the numbers is that of serial's
rounds (`record/bounds.py`).
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from tailrace import clock
from tailrace.config import PolicyConfig, RunConfig, load_config, translated_parameters
from tailrace.drivers.assembly.check import begin_start, check_live
from tailrace.drivers.assembly.folder import COMPARED, COMPARED_VIRTUALLY, RunFolder, recorder_of
from tailrace.drivers.assembly.results import ComparisonSummary
from tailrace.drivers.assembly.resumption import dated
from tailrace.drivers.assembly.schedule import (
    check_parameter_names,
    resolve,
    rounds_of_equal_steps,
    with_decay_steps,
    with_published_defaults,
)
from tailrace.drivers.assembly.simulation import run_virtual, sources
from tailrace.drivers.assembly.trials import BoundRun, SharedWorkers, run_trial
from tailrace.drivers.commands.compare_runs import figures_of, folders_of, table_of, verdict
from tailrace.drivers.commands.tables import check_output, open_console, print_table
from tailrace.errors import ConfigError, say
from tailrace.record.events import Recorder, Row
from tailrace.record.figures import BIASES, COSTS, QUALITIES, TIMES, TRIAL_FIGURES
from tailrace.record.summary import Summary

LIVE, VIRTUAL = "the comparison", "the comparison, in seconds of virtual time"
WARM_UP_ROUNDS = 2
"""Rounds of the live trial of each schedule that is run before the comparison and not counted."""
BASELINE = "serial"
NESTED = ("staleness", "lag", "ess")
"""Prefixes of figures that are grouped in the numbers: staleness_mean is staleness.mean."""
LAG_COSTS = {4.0: "1 to 8% less reward", 13.5: "8 to 13% less reward", 30.0: "17 to 25% less reward"}
"""Largest mean lag in optimizer steps, and the mean reward of 4,096 samples, less that without lag: the study
lagcurve of benchmarks/results/learning.md, of a model of 0.4M parameters."""
SPREAD = ("main_time_s", "samples_per_s")
"""Figures whose range is printed."""


def compare(
    *configs: Path,
    schedules: str | None = None,
    vary: list[str] | None = None,
    repeats: str | None = None,
    virtual: bool = False,
    output_dir: Path | None = None,
    json_path: Annotated[Path | None, Parameter("--json")] = None,
    overrides: Mapping[str, str],
) -> ComparisonSummary:
    """Race schedules, or values of settings, and say which is faster; or compare finished runs.

    Args:
        configs: a TOML file; or the output directories of runs, which are compared as they are.
        schedules: A,B: instead of compare.schedules.
        vary: KEY=A,B: race these values of a setting, too, under each of --schedules, or under the config's
            own schedule. Several times: all combinations.
        repeats: instead of compare.repeats.
        virtual: compare in virtual time, as a config without [model] always does. No model is needed.
        output_dir: for the files of each schedule and compare.json.
        json_path: another file for the medians.
    """
    check_output("--json", json_path, r'\A{\s*"(schedules|verdict)": ')
    console, folder = open_console(), output_dir
    if configs and all(path.is_dir() for path in configs):
        return _compare_runs(console, folders_of(configs), json_path)
    if len(configs) != 1:
        problem, remedy = "it takes one config, or the folders of runs", "name one config"
        raise ConfigError("CONFIG", " ".join(map(str, configs)), problem, remedy)
    named = {"compare.schedules": schedules and str(schedules.split(",")), "compare.repeats": repeats}
    given = {**overrides, **{key: text for key, text in named.items() if text}}
    candidates: dict[str, BoundRun] = {}
    for varied in map(dict, product(*map(_values, vary or ()))):
        loaded = load_config(*configs, {**given, **varied})
        prices = loaded.prices and loaded.prices.unlimited  # a trial that a budget ends is not comparable
        loaded = loaded.changed(prices=prices)
        loaded = loaded if virtual or not loaded.model else dated(PolicyConfig.of(loaded))
        if loaded.model and (day := loaded.model.template_date):  # of all candidates
            given["model.template_date"] = str(day)
        names = loaded.compare.schedules if schedules or not vary else (str(loaded.schedule.get("name")),)
        label = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in varied.items())
        for name, each in _candidates(loaded, names).items():
            candidates[label if label and len(names) == 1 else f"{name} {label}".strip()] = each
    if not virtual and loaded.model is None:
        console.print("the config has no [model]: the comparison is in virtual time")
        virtual = True
    if folder:
        written = COMPARED_VIRTUALLY if virtual else COMPARED
        RunFolder(folder).claim("compare", names=written, only_check=True)
        for name in candidates:
            _folder_of(name, folder).claim("compare", only_check=True)
        RunFolder(folder).claim("compare", names=written)
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
    figures = {json.dumps(trials) for trials in comparison.trials.values()}
    if virtual and vary and len(figures) < len(candidates):
        keys = ", ".join(each.partition("=")[0] for each in vary)
        say(f"virtual time does not see each value of {keys}: some candidates are equal in every figure")
    console.print(comparison.verdict(), soft_wrap=False)
    print_table(console, comparison.table(VIRTUAL if virtual else LIVE, prices.currency if prices else ""))
    if virtual:
        console.print(sources(loaded), soft_wrap=False)
    if folder:
        console.print(f"files     {folder}/*/  (tailrace view {folder})")
    numbers = comparison.numbers()
    for path in (json_path, folder and folder / "compare.json"):
        if path:
            path.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return ComparisonSummary(**numbers)


# -- the comparison --------------------------------------------------------------------------------


def _values(text: str) -> list[tuple[str, str]]:
    """The key of `KEY=A,B` with each value."""
    key, _, values = text.partition("=")
    if "." not in key or not values:
        raise ConfigError("--vary", text, "it names no values of a setting", "write section.key=A,B")
    return [(key, value) for value in values.split(",")]


def _compare_runs(
    console: Console, folders: Mapping[str, RunFolder], json_path: Path | None
) -> ComparisonSummary:
    if not all(folder.command == "sft" for folder in folders.values()):
        for folder in folders.values():  # losses and rewards are not compared
            folder.check_wrote("rewards", "train", "simulate", "compare")
    runs = {name: figures_of(folder) for name, folder in folders.items()}
    said = verdict(runs)
    console.print(said, soft_wrap=False)
    print_table(console, table_of(folders, runs))
    if json_path:
        json_path.write_text(json.dumps({"verdict": said, "runs": runs}, indent=2) + "\n", encoding="utf-8")
    return ComparisonSummary(said, runs=runs)


def _candidates(config: RunConfig, names: Sequence[str]) -> dict[str, BoundRun]:
    """The schedules with as many samples and optimizer steps as the config's rounds have."""
    check_parameter_names(config, names)
    candidates: dict[str, BoundRun] = {}
    for name in names:
        parameters, chosen = translated_parameters(config, name)
        if chosen:
            listed = ", ".join(f"{key} = {value}" for key, value in chosen.items())
            say(f"{name}: {listed}, for equal samples and steps; [schedules.{name}] sets others")
        named = config.changed(schedule=parameters)
        try:
            schedule = resolve(named)
            rounds = rounds_of_equal_steps(config, named, schedule)
            named = named.changed(run={"rounds": rounds})
            named = with_decay_steps(with_published_defaults(named), schedule)
            candidates[name] = BoundRun(named, schedule)
        except ConfigError as why:
            why.args = (f"{name}: {why}",)
            raise
    return candidates


async def compare_live(
    candidates: Mapping[str, BoundRun], repeats: int, folder: Path, *, files: Path | None = None
) -> "Comparison":
    """Compare on real workers, whose logs and first weights go to `folder`. The files of each candidate's
    last trial go to `files`."""
    comparison = Comparison(learns=True)
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


def compare_virtual(candidates: Mapping[str, BoundRun], repeats: int, folder: Path | None) -> "Comparison":
    """Compare in virtual time. Repetition r has the seed run.seed + r. Files go to `folder`."""
    comparison = Comparison()
    for repeat in range(repeats):
        for name, candidate in candidates.items():
            config, (recorder, summary) = candidate.config, _recorder(name, candidate, folder)
            run_virtual(config.changed(run={"seed": config.run.seed + repeat}), candidate.schedule, recorder)
            comparison.add(name, summary)
    return comparison


def in_turn(candidates: Mapping[str, BoundRun], repeat: int) -> list[str]:
    """The order of a repetition: the first place rotates; candidates with the same workers are neighbours."""
    names = list(candidates)
    turn = repeat % len(names)
    rotated = names[turn:] + names[:turn]
    setups = list(dict.fromkeys(candidates[name].setup for name in rotated))
    return sorted(rotated, key=lambda name: setups.index(candidates[name].setup))


def _recorder(name: str, candidate: BoundRun, folder: Path | None) -> tuple[Recorder, Summary]:
    """The files of a trial are those of a run, in a folder of the candidate's name."""
    own = _folder_of(name, folder) if folder else None
    if own:
        own.begin_anew("compare", candidate.config.toml())
    summary = Summary(own.summary if own else None)
    return recorder_of(own, summary), summary


def _folder_of(candidate: str, folder: Path) -> RunFolder:
    return RunFolder(folder / candidate.replace("/", "_"))


# -- its figures ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """The counted trials of a comparison by the name of the schedule."""

    trials: dict[str, list[Row]] = field(default_factory=dict)
    learns: bool = False

    def add(self, name: str, summary: Summary) -> None:
        self.trials.setdefault(name, []).append(summary.figures())

    @property
    def bound_s(self) -> float | None:
        """The bound on the main time of a round; None if serial did not run."""
        return self._median(BASELINE, "bound_s") if BASELINE in self.trials else None

    def numbers(self) -> dict[str, Any]:
        """Medians of all figures, the range of the main time, and every trial."""
        schedules = {name: self._numbers(name) for name in self.trials}
        return {"schedules": schedules, "bound_s": self.bound_s, "verdict": self.verdict()}

    def verdict(self) -> str:
        """Who trains the most samples a second, whether by more than the spread of the trials, and what
        the age of its tokens costs."""
        best, *others = sorted(self.trials, key=lambda name: -self._median(name, "samples_per_s"))
        rate = f"{self._median(best, 'samples_per_s'):.3g} samples/s"
        if not others:
            return f"{best} alone: {rate}; name another one to compare it with"
        other = BASELINE if BASELINE in others else others[0]
        ratios, num = self._ratios(best, other), len(self.trials[best])
        spread = f"{min(ratios):.2f} to {max(ratios):.2f} over {num} trials"
        said = f"{best} trains {median(ratios):.2f} times as many samples a second as {other}"
        if num == 1:
            if f"{ratios[0]:.2f}" == "1.00":
                said = f"{best} and {other} train equally many samples a second"
            said += f": {rate}; it was one trial, so its spread is not known"
        elif min(ratios) > 1.0:
            said += f" ({spread}): {rate}"
        else:
            said = f"{best} and {other} cannot be told apart: {median(ratios):.2f} times ({spread})"
        alike = [each for each in others if each != other and min(self._ratios(best, each)) <= 1.0]
        said += f"; nor can {best} be told from {', '.join(alike)}" if alike else ""
        length, usual = (self._median(each, "length_mean") for each in (best, other))
        if length < 0.9 * usual:
            lengths = f"{length:,.0f} tokens against {usual:,.0f}"
            said += f". Its samples are shorter ({lengths}): compare over more rounds"
        lag, most = self._median(best, "lag_mean"), self._median(best, "lag_max")
        age = f"A token of {best} is {lag:.1f} optimizer steps old in the mean, {most:.0f} at most"
        cost = next((cost for largest, cost in LAG_COSTS.items() if lag <= largest), "an unmeasured reward")
        return f"{said}. {age}{f'; 4,096 sums at such a lag had {cost}' if lag else ''}.{self._learnt()}"

    def _learnt(self) -> str:
        """Who has the highest mean reward; empty in virtual time, in which nothing is learnt."""
        if not self.learns:
            return ""
        best, second, *_ = sorted(self.trials, key=lambda name: -self._median(name, "reward"))
        is_sure = min(self._values(best, "reward")) > max(self._values(second, "reward"))
        chance = "" if is_sure and len(self.trials[best]) > 1 else ", which may be chance"
        high, low = (f"{self._median(name, 'reward'):.3f}" for name in (best, second))
        if high == low:
            return f" {best} and {second} have the same mean reward, {high}."
        return f" {best} has the highest mean reward, {high}; {second} {low}{chance}."

    def table(self, title: str, currency: str = "") -> Table:
        """A column for each schedule, a row for each figure. A comparison without prices has no currency."""
        table = Table("medians [lowest - highest]", title=title, title_justify="left")
        for name in self.trials:
            table.add_column(name, justify="right")
        costs = {key: (label, f"{form} {currency}") for key, (label, form) in COSTS.items() if currency}
        ruled = all("length_bias" in trial for trials in self.trials.values() for trial in trials)
        for figure, (label, form) in {**TIMES, **costs, **QUALITIES, **(BIASES if ruled else {})}.items():
            table.add_row(label, *(self._cell(name, figure, form) for name in self.trials))
            if figure == "main_s_per_1000_samples" and BASELINE in self.trials:
                serial_s = self._median(BASELINE, figure)  # of equal samples: rounds may differ in size
                shares = (self._median(name, figure) / serial_s - 1 for name in self.trials)
                table.add_row("against serial", *(f"{share:+.1%}" for share in shares))
        return table

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

    def _ratios(self, name: str, other: str) -> list[float]:
        """How many times as many samples a second as another one, trial by trial: those of a repetition have
        the same seed."""
        pairs = zip(self._values(name, "samples_per_s"), self._values(other, "samples_per_s"), strict=True)
        return [mine / theirs for mine, theirs in pairs]

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
