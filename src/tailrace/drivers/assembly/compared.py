"""The parameters of schedules that are compared with one another, and rounds of as many optimizer steps."""

import math
from typing import Any

from tailrace.config import RunConfig
from tailrace.drivers.assembly.schedule import BoundSchedule, find_schedule, parameters_of, steps_of_a_round


def shared_parameters(config: RunConfig, name: str) -> dict[str, Any]:
    """The [schedule] section for another schedule: the parameters that the other schedule has, too. Raises a
    ConfigError if there is no such schedule."""
    accepted = parameters_of(find_schedule(name))
    return {key: value for key, value in config.schedule.items() if key in accepted} | {"name": name}


def compared_parameters(config: RunConfig, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """[schedule] for a schedule of a comparison. What it needs and the config does not give makes its rounds
    as large as those of the others, with twice a step in flight. One that makes one step of each round has
    the groups of a step in a round: its steps are as large as those of the others.

    Returns:
        The parameters, and those of them that the config does not give.
    """
    shared, needed = shared_parameters(config, name), parameters_of(find_schedule(name))
    given = {**config.schedule, **config.schedules.get(name, {})}
    step = given.get("groups_per_step") or given.get("groups_per_round")
    if not isinstance(step, int):
        return shared, {}  # the check of the parameters says what is missing
    groups = given.get("groups_per_round") or step * given.get("steps_per_round", 1)
    if "groups_per_step" not in needed:
        groups = config.schedules.get(name, {}).get("groups_per_round", step)
    staleness = given.get("staleness", 1)
    requests = math.ceil(config.run.group_size / (config.sim.engines.count or config.engine.num_engines))
    sensible = {
        "groups_per_round": groups,
        "groups_per_step": step,
        "steps_per_round": max(1, groups // step),
        "groups_launched": math.ceil(1.5 * groups),
        "groups_per_draw": math.ceil(1.5 * groups),
        "staleness": staleness,
        "steps_off_policy": staleness,
        "groups_in_flight": (staleness + 1) * step,
        "window": step,
        "ring_groups": 2 * step,
        "in_flight_per_engine": 2 * step * requests,
        "requests_per_engine": math.ceil(1.5 * groups) * requests,
    }
    missing = [key for key, each in needed.items() if each.default is each.empty and key not in given]
    if shared.get("groups_per_round", groups) != groups:
        missing.append("groups_per_round")
    chosen = {key: sensible[key] for key in missing if key in sensible}
    return shared | chosen, chosen


def rounds_of_equal_steps(config: RunConfig, compared: RunConfig, schedule: BoundSchedule) -> int:
    """The rounds in which a compared schedule makes as many optimizer steps as run.rounds rounds of the
    config's groups_per_round in steps of groups_per_step."""
    given = config.schedule
    step, groups = given.get("groups_per_step"), given.get("groups_per_round")
    steps = groups // step if step and groups else given.get("steps_per_round", 1)
    own = steps_of_a_round(compared, schedule) or steps
    return max(1, int(config.run.rounds * steps / own + 0.5))
