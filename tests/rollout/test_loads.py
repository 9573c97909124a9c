"""Which engine has the smallest share of its slots taken."""

import random

import pytest

from tailrace.rollout.loads import EngineLoads
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import SimEngineSettings

pytestmark = pytest.mark.virtual


async def test_the_choice_is_that_of_looking_at_every_engine() -> None:
    chance = random.Random(0)
    engines = [
        SimEngine(f"{n}", SimEngineSettings(slots=chance.choice([4, 8, 24])), lambda sample: 1)
        for n in range(7)
    ]
    loads, requests = EngineLoads(engines), [0] * len(engines)
    choices = set()
    for _ in range(2000):
        number = chance.randrange(len(engines))
        if chance.random() < 0.1:
            engines[number].state = chance.choice(["open", "asleep", "dead", "dead"])
            loads.refresh()
        else:
            change = chance.choice([-1, 1]) if requests[number] else 1
            requests[number] += change
            loads.add(number, change)
        is_open = [n for n, engine in enumerate(engines) if engine.state == "open"]
        least = min(is_open, key=lambda n: requests[n] / engines[n].slots, default=None)
        choices.add(least)
        assert (loads.least_loaded(), loads.num_open) == (least, len(is_open))
        assert loads.slots == sum(engines[n].slots for n in is_open)
    assert choices == {None, *range(len(engines))}
