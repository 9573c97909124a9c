"""Every schedule over engines that are killed at random moments and restarted under supervision."""

import random
from collections import Counter
from functools import partial

import pytest

from helpers import mortal
from helpers.mortal import mortal_parts, mortality
from helpers.virtual import (
    PINNED,
    SCHEDULES_BY_NAME,
    SETTINGS,
    SIM,
    ZERO_VARIANCE,
    change,
    regenerated,
    simulate,
)
from tailrace.controller.base import RunSettings
from tailrace.record.events import EngineStateChanged, RequestEnded, Stepped
from tailrace.schedules import SCHEDULES

KILLS = 12
FEW_SLOTS = change(SIM, engines=change(SIM.engines, slots=8, versions=2))


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
    assert regenerated(outcome.events, verifies=outcome.run.verifies) == []
    assert max(Counter(s.id for step in outcome.of(Stepped) for s in step.samples).values()) == 1
    deaths = [event for event in outcome.of(EngineStateChanged) if event.state == "dead"]
    assert len(deaths) > KILLS / 2
    assert any(event.outcome == "evicted" for event in outcome.of(RequestEnded))
    gained = sum(event.num_gained for event in outcome.of(RequestEnded))
    assert gained == sum(usage.num_generated for usage in outcome.usages)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PINNED)
def test_a_pinned_sample_has_tokens_of_its_version_alone_and_groups_of_k_stay_groups_of_k(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publications come while an engine is away, and its next life has the last of them only. Each life
    checks the versions that it is asked for."""
    monkeypatch.setattr(mortal, "START_S", 60.0)
    settings = RunSettings(rounds=20, group_size=4, seed=seed)
    outcome = simulate(
        partial(SCHEDULES[name], groups_per_step=4, groups_in_flight=8, staleness=1),
        settings,
        FEW_SLOTS,
        algorithm=ZERO_VARIANCE,
        parts=mortal_parts(FEW_SLOTS, seed),
        beside=partial(mortality, kills_s=[(30.0 + 66 * n, n % 2) for n in range(8)]),
    )
    trained = [sample for step in outcome.of(Stepped) for sample in step.samples]
    assert {len(sample.spans) for sample in trained} == {1}
    assert "refused" not in {event.outcome for event in outcome.of(RequestEnded)}
    assert outcome.totals.wasted_tokens["version gone"] and outcome.totals.groups["filtered"]
    assert outcome.totals.wasted_tokens["raced"] == 0
    assert {*Counter(sample.prompt.index for sample in trained).values()} == {4}
