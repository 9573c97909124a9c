"""Schedules by the names that a config gives, and their parameters, which are the keys of [schedule]."""

import inspect

from tailrace.errors import ConfigError
from tailrace.importing import import_function
from tailrace.schedules import SCHEDULES, Schedule

ORDER = inspect.Parameter("order", inspect.Parameter.KEYWORD_ONLY, default="launched")
"""A parameter of every schedule: the order of the pool's queue."""


def parameters_of(schedule: Schedule) -> dict[str, inspect.Parameter]:
    """Return the parameters of a schedule by name, the order of the queue among them."""
    _, *parameters = inspect.signature(schedule).parameters.items()  # the first is the run
    own = dict(parameters)
    return own | {"order": own.get("order", ORDER)}


def find_schedule(name: object, key: str = "schedule.name") -> Schedule:
    """Return a schedule of this package or of the user's. Raises a ConfigError of a key if there is none."""
    names = ", ".join(SCHEDULES)
    if not isinstance(name, str):
        raise ConfigError(key, name, "it is missing", f"choose from {names}")
    if name in SCHEDULES:
        return SCHEDULES[name]
    if ":" not in name:
        raise ConfigError(
            key, name, "there is no such schedule", f"choose from {names}, or 'module:function'"
        )
    schedule: Schedule = import_function(name, key)
    if not inspect.iscoroutinefunction(schedule):
        raise ConfigError(key, name, "it is not an async function", "write `async def`")
    return schedule
