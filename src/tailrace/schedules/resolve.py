"""From the config's [schedule] section to a schedule that can run: found, its parameters checked, rehearsed.

A rehearsal runs the schedule for two rounds in virtual time. Whatever a schedule refuses, promises in vain or
waits for in vain comes out before anything real starts; so does what a schedule from outside gets wrong.
"""

import inspect
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tailrace import clock
from tailrace.config import RunConfig, explain
from tailrace.controller.execution import execute
from tailrace.errors import ConfigError, ScheduleError, Stuck
from tailrace.importing import import_function
from tailrace.controller.base import RunSettings
from tailrace.record.events import Recorder
from tailrace.controller.run import Run
from tailrace.schedules import SCHEDULES, Schedule
from tailrace.schedules.parameters import require
from tailrace.sim.settings import SimLengthSettings, SimSettings
from tailrace.controller.simulation import simulated_parts

BoundSchedule = partial[Coroutine[Any, Any, None]]
"""A schedule with its parameters: waits for the run."""


def resolve(config: RunConfig) -> BoundSchedule:
    """The schedule of a config, ready to run: [schedule], and [schedules.NAME] over it.

    Raises:
        ConfigError: it is not found, or its parameters do not fit it or one another.
    """
    settings = config.run
    name = config.schedule.get("name")
    section = {**config.schedule, **config.schedules.get(str(name), {})}
    parameters = {key: value for key, value in section.items() if key != "name"}
    schedule = _find(name)
    _, *settable = inspect.signature(schedule).parameters.items()  # the first is the run
    accepted = dict(settable)
    if "B" in parameters and "B" not in accepted and "U" in accepted:
        require("U" not in parameters, "B", parameters["B"], "U says the same", "give one of the two")
        parameters["U"] = _groups_per_step(parameters.pop("B"), settings.group_size)
    bound = partial(schedule, **_checked(schedule, accepted, parameters))
    _rehearse(bound, settings)
    return bound


def shared_parameters(config: RunConfig, name: str) -> dict[str, Any]:
    """What [schedule] says for another schedule than the one it names: the parameters it has too.

    Raises:
        ConfigError: there is no such schedule.
    """
    accepted = {"name", "B", *inspect.signature(_find(name)).parameters}
    return {key: value for key, value in config.schedule.items() if key in accepted} | {"name": name}


def _find(name: object) -> Schedule:
    if not isinstance(name, str):
        raise ConfigError("schedule.name", name, "it is missing", f"choose from {', '.join(SCHEDULES)}")
    if name in SCHEDULES:
        return SCHEDULES[name]
    if ":" in name:
        schedule: Schedule = import_function(name, "schedule.name")
        if inspect.iscoroutinefunction(schedule):
            return schedule
        raise ConfigError("schedule.name", name, "it is not an async function", "write `async def`")
    raise ConfigError(
        "schedule.name",
        name,
        "there is no such schedule",
        f"choose from {', '.join(SCHEDULES)}, or 'module:function'",
    )


def _groups_per_step(B: Any, K: int) -> int:
    """U = B/K (RolloutPipe 3.2)."""
    if not isinstance(B, int) or B < 1 or B % K:
        raise ConfigError(
            "schedule.B", B, f"samples a step must be whole groups of K = {K}", f"choose {K} times U"
        )
    return B // K


def _checked(
    schedule: Callable[..., Any], accepted: Mapping[str, inspect.Parameter], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The given parameters, as the types of the signature."""
    hints = get_type_hints(schedule, include_extras=True)
    for name in (name for name in given if name not in accepted):
        raise ConfigError(
            f"schedule.{name}",
            given[name],
            "the schedule has no such parameter",
            f"it has: {', '.join(accepted)}",
        )
    for name, parameter in accepted.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"schedule.{name}", None, "it is missing", "set it")
    try:
        return {
            name: TypeAdapter(hints.get(name, Any)).validate_python(value) for name, value in given.items()
        }
    except ValidationError as why:
        failed = next(name for name in given if not _fits(hints.get(name, Any), given[name]))
        raise explain(why, f"schedule.{failed}") from None


def _fits(hint: Any, value: Any) -> bool:
    try:
        TypeAdapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True


def _rehearse(schedule: BoundSchedule, settings: RunSettings) -> None:
    """
    Raises:
        ConfigError: the schedule cannot run with these parameters.
    """
    short = SimSettings(lengths=SimLengthSettings(median_tokens=20, max_tokens=100))
    group_size = min(settings.group_size, 2)  # what a schedule promises or waits for does not hang on K
    rehearsal = RunSettings(rounds=2, group_size=group_size, give_up_s=3600.0)

    async def watched(run: Run) -> None:
        await schedule(run)
        if run.promised is None:
            raise ScheduleError(
                "the schedule promises nothing; it must say run.promise(staleness=...): 0 is on-policy, "
                "math.inf is no bound"
            )

    async def two_rounds() -> None:
        await execute(watched, simulated_parts(short, settings.seed), rehearsal, Recorder())

    try:
        clock.run(two_rounds(), virtual=True)
    except (ScheduleError, Stuck) as why:
        raise ConfigError(
            "schedule", "these parameters", f"a rehearsal failed: {why}", "change them"
        ) from why
