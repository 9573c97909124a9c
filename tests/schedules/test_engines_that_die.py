"""Every schedule over engines that are killed at random moments and restarted under supervision."""

import random
from collections import Counter
from functools import partial

import pytest

from helpers.mortal import mortal_parts, mortality
from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, SIM, regenerated, simulate
from tailrace.record.events import EngineStateChanged, RequestEnded, Stepped

KILLS = 12


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_engines_killed_at_random_moments_cost_time_and_nothing_else(name: str) -> None:
    clean = simulate(SCHEDULES_BY_NAME[name])
    chance = random.Random(name)
    kills_s = [(chance.uniform(0, clean.ended_s), chance.randrange(2)) for _ in range(KILLS)]
    outcome = simulate(
        SCHEDULES_BY_NAME[name],
        parts=mortal_parts(SIM, SETTINGS.seed),
        beside=partial(mortality, kills_s=kills_s),
    )
    assert outcome.run.overtime  # and its books closed
    assert outcome.totals.groups["trained"] >= 3 * 8
    assert regenerated(outcome.events) == []
    assert max(Counter(s.id for step in outcome.of(Stepped) for s in step.samples).values()) == 1
    deaths = [event for event in outcome.of(EngineStateChanged) if event.state == "dead"]
    assert len(deaths) > KILLS / 2
    assert any(event.outcome == "evicted" for event in outcome.of(RequestEnded))
    gained = sum(event.num_gained for event in outcome.of(RequestEnded))
    assert gained == sum(usage.num_generated for usage in outcome.usages)
