"""`tailrace compare`: a race of schedules (race.py) and its figures (comparison.py)."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tailrace import clock
from tailrace.assembly.live import check_live
from tailrace.assembly.schedule import (
    check_parameter_names,
    resolve,
    shared_parameters,
    with_published_defaults,
)
from tailrace.assembly.simulation import note_default_costs
from tailrace.commands.comparison import Comparison
from tailrace.commands.race import Racer, race_live, race_virtual
from tailrace.commands.tables import open_console, print_table
from tailrace.config import RunConfig, with_model_folder

LIVE, VIRTUAL = "the race", "the race, in seconds of virtual time"


def compare(
    config: RunConfig, *, virtual: bool = False, folder: Path | None = None, json_path: Path | None = None
) -> None:
    """Race the schedules of `compare.schedules` and print the table.

    Args:
        virtual: whether to race in virtual time. A config without [model] is always raced so.
        folder: where the files of each schedule and compare.json go; None: none are written.
        json_path: another file for the numbers.

    Raises:
        ConfigError: a schedule is unknown, or its parameters cannot work.
    """
    console = open_console()
    racers = _racers(config if virtual else with_model_folder(config))
    if not virtual and config.model is None:
        console.print("the config has no [model]: the race is in virtual time", markup=False)
        virtual = True
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    if virtual:
        measured = race_virtual(racers, config.compare.repeats, folder)
    else:
        schedules = [racer.schedule for racer in racers.values()]  # all race with the same threads
        fitted = {name: check_live(racer.config, *schedules) for name, racer in racers.items()}
        print(next(iter(fitted.values())).table, file=sys.stderr)
        racers = {name: replace(racer, config=fitted[name].config) for name, racer in racers.items()}
        with TemporaryDirectory() as scratch:
            place = folder or Path(scratch)
            race = race_live(racers, config.compare.repeats, place, with_files=folder is not None)
            measured = clock.run(race, virtual=False)
    comparison = Comparison(measured.laps)
    print_table(console, comparison.table(VIRTUAL if virtual else LIVE))
    if virtual:
        note_default_costs(config.sim, console)
    if folder:
        console.print(f"files     {folder}/*/  (tailrace view {folder})", markup=False)
    for path in (json_path, folder and folder / "compare.json"):
        if path:
            path.write_text(json.dumps(comparison.numbers(), indent=2) + "\n")


def _racers(config: RunConfig) -> dict[str, Racer]:
    check_parameter_names(config, config.compare.schedules)
    racers: dict[str, Racer] = {}
    for name in config.compare.schedules:
        named = config.model_copy(update={"schedule": shared_parameters(config, name)})
        racers[name] = Racer(with_published_defaults(named), resolve(named))
    return racers
