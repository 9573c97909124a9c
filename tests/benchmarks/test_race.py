"""The race of all schedules: it names each of them, with parameters that work."""

import common
from tailrace.config import load_config
from tailrace.drivers.assembly.schedule import resolve, shared_parameters
from tailrace.schedules import SCHEDULES


def test_every_schedule_races_with_parameters_that_work() -> None:
    config = load_config(common.EXAMPLES.parent / "benchmarks" / "race.toml")
    assert set(config.compare.schedules) == set(SCHEDULES) == set(config.schedules)
    for name in config.compare.schedules:
        resolve(config.model_copy(update={"schedule": shared_parameters(config, name)}))
