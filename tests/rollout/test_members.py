"""The rules of [run.groups]: which members are trained, what became of the others, and the bias of each rule
against closed forms.

Responses have the lengths of a quasi-random sequence (additive recurrence, Roberts 2018), whose means converge
faster than those of random numbers. Each control group has the lengths of the ruled group after it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, comb, log
from typing import Any

import pytest

from helpers.virtual import EXACT, SCHEDULES_BY_NAME, Outcome, change, simulate, worlds
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.run import Run
from tailrace.errors import AllLate, ConfigError, RewardFailed
from tailrace.record.events import GroupEnded, Stepped
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary
from tailrace.rollout.members import GroupSettings
from tailrace.schedules import SCHEDULES
from tailrace.types import Sample

LONGEST = 1000
"""Tokens, and with EXACT seconds, of the longest response."""
SIZE, ROUNDS, GROUPS = 4, 8, 200
LAW = Callable[[float], float]


def quantile(sample: Sample) -> float:
    """Equidistributed over all tuples of members' numbers."""
    root = 1.05  # of x ** (n + 1) = x + 1, for n = 12 members
    for _ in range(60):
        root = (1 + root) ** (1 / 13)
    return (0.5 + (sample.prompt.index // 2 + 1) * root ** -(sample.id.number + 1.0)) % 1.0


def uniform(u: float) -> float:
    return u * LONGEST


def exponential(u: float) -> float:
    return -200 * log(1 - u)


class LengthRewards:
    """1 for a response of at most half of the longest, else 0. The longest of all fail."""

    def __init__(self, fails_above: float) -> None:
        self._fails_above = fails_above

    async def score(self, sample: Sample) -> float:
        if sample.num_tokens > self._fails_above:
            raise RewardFailed("raised")
        return float(sample.num_tokens <= LONGEST / 2)


def outcome_of(
    law: LAW, fails_above: float = 1e9, rounds: int = ROUNDS, schedule: Any = None, **rules: Any
) -> tuple[Outcome, Summary]:
    sim = change(EXACT, trainer={**EXACT.trainer.model_dump(), "tokens_per_s": 1e9})
    sim = change(sim, engines={**sim.engines.model_dump(), "slots": 10_000})
    made = worlds(sim, lambda sample: max(1, ceil(law(quantile(sample)))))
    parts: Callable[[], RunComponents] = lambda: replace(made(), rewards=LengthRewards(fails_above))  # noqa: E731
    settings = RunSettings(rounds=rounds, group_size=SIZE, groups=GroupSettings(**rules))
    schedule = schedule or partial(SCHEDULES["serial"], groups_per_round=GROUPS, groups_per_step=GROUPS)
    outcome, summary = Outcome(), Summary()
    simulate(schedule, settings, sim, parts=parts, into=outcome)
    meter = StepMeter(summary, wall_clock=lambda: 0.0)
    for event in outcome.events:
        meter.on(event)
    meter.close()
    return outcome, summary
