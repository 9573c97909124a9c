"""Set-ups drawn at random, and the racers of each class of staleness. It belongs to race_random.py."""

import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tailrace.controller.run import Run
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)

Bound = Callable[[Run], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Setup:
    """A set-up drawn at random."""

    number: int
    devices: int
    """An engine has one device."""
    engines: int
    """Devices that generate where the others train: the division at which both sides are nearest to the same
    rate of tokens."""
    slots: int
    base_s: float
    slope_s: float
    load_s: float
    median_tokens: int
    sigma: float
    correlation: float
    max_tokens: int
    reward_s: float
    tokens_per_s: float
    """Of one device that trains."""
    groups: int
    """Groups of an optimizer step (U)."""
    group_size: int
    epochs: bool
    """Whether the data has few rows, so that they come again."""

    @property
    def words(self) -> str:
        step = f"{1e3 * self.base_s:.0f} ms + {1e3 * self.slope_s:.2f} ms"
        parts = (
            f"{self.devices} devices, {self.engines} of them engines if separate",
            f"{self.slots} slots ({step}), or {self.tokens_per_s:,.0f} trained tokens/s",
            f"{self.groups} x {self.group_size} a step",
            f"{self.median_tokens} tokens, sigma {self.sigma:.2f}, correlation {self.correlation:.2f}",
            f"{self.reward_s:.2g} s a reward",
            "epochs" if self.epochs else "no epochs",
        )
        return "; ".join(parts)

    def sim(self, in_turn: bool) -> SimSettings:
        num_training = self.devices if in_turn else self.devices - self.engines
        return SimSettings(
            engines=SimEngineSettings(
                count=self.devices if in_turn else self.engines,
                slots=self.slots,
                base_s=self.base_s,
                slope_s=self.slope_s,
                load_s=self.load_s,
            ),
            trainer=SimTrainerSettings(tokens_per_s=self.tokens_per_s * num_training),
            lengths=SimLengthSettings(
                median_tokens=self.median_tokens,
                sigma=self.sigma,
                correlation=self.correlation,
                max_tokens=self.max_tokens,
                rows=6 * self.groups if self.epochs else None,
            ),
            rewards=SimRewardSettings(workers=1024, median_s=self.reward_s, timeout_s=300.0),
        )


def drawn(number: int, seed: int) -> Setup:
    """The set-up of a number: every quantity independently, rates and times on a logarithmic scale."""
    chance = random.Random(f"set-up {seed} {number}")

    def between(low: float, high: float) -> float:
        return math.exp(chance.uniform(math.log(low), math.log(high)))

    devices, slots = chance.choice([2, 4, 8]), chance.choice([4, 8, 16, 32, 64])
    groups, group_size = chance.choice([6, 8, 10]), 4
    base_s, slope_s = between(4e-3, 20e-3), between(0.02e-3, 0.3e-3)

    def generated_per_s(engines: int) -> float:
        running = min(slots, 1.5 * groups * group_size / engines)
        return engines * running / (base_s + slope_s * running)

    tokens_per_s = generated_per_s(devices) / devices * between(0.5, 4.0)
    engines = max(
        range(1, devices), key=lambda count: min(generated_per_s(count), (devices - count) * tokens_per_s)
    )
    median_tokens = round(between(200, 2000))
    return Setup(
        number=number,
        devices=devices,
        engines=engines,
        slots=slots,
        base_s=base_s,
        slope_s=slope_s,
        load_s=between(0.2, 4.0),
        median_tokens=median_tokens,
        sigma=chance.uniform(0.3, 1.5),
        correlation=chance.uniform(0.2, 0.95),
        max_tokens=median_tokens * chance.choice([8, 16, 32]),
        reward_s=between(0.05, 30.0),
        tokens_per_s=tokens_per_s,
        groups=groups,
        group_size=group_size,
        epochs=chance.random() < 0.5,
    )


@dataclass(frozen=True)
class Racer:
    """A schedule with parameters.

    Args:
        steps: optimizer steps of one of its rounds.
    """

    name: str
    schedule: Bound
    steps: int = 1
    in_turn: tuple[bool, ...] = (True,)
    """The placements on which it runs: all devices in turn, or separate ones."""


def racer(label: str, *, steps: int = 1, **parameters: Any) -> Racer:
    """The label begins with the schedule's name."""
    return Racer(label, partial(SCHEDULES[label.split(",")[0]], **parameters), steps)


def apart(label: str, **parameters: Any) -> Racer:
    """A schedule that trains while it generates, on devices of its own for each."""
    return replace(racer(label, **parameters), in_turn=(False,))


def either(label: str, **parameters: Any) -> Racer:
    """A schedule that trains while it generates where it can, on the placement on which it is faster."""
    return replace(racer(label, **parameters), in_turn=(False, True))


def classes(setup: Setup) -> dict[str, list[Racer]]:
    """The racers of each class."""
    U, engines, K = setup.groups, setup.engines, setup.group_size
    requests = math.ceil(1.25 * U * K / engines)
    on_policy = [
        racer("serial", groups_per_round=U, groups_per_step=U),
        racer("seer", groups_per_round=U, groups_per_step=U),
        racer("sortedrl_on_policy, 4 U", groups_per_round=4 * U, groups_per_step=U),
        racer("sortedrl_on_policy, 8 U", groups_per_round=8 * U, groups_per_step=U),
        racer("tailbatch_dapo", groups_per_round=U, requests_per_engine=requests, response_speculation=1.0),
        racer("tailbatch, prompts", groups_per_round=U, response_speculation=1.0),
        apart("rollpacker, prompts", groups_per_round=U, response_speculation=1.0),
        apart("rollpacker, both", groups_per_round=U, response_speculation=1.25),
        apart("periodic_asynchrony", groups_per_round=U),
        apart("streamrl", groups_per_round=U),
        either("tailrace_on_policy", groups_per_round=U),
    ]

    def bounded(lag: int, in_flight: float) -> list[Racer]:
        R, alive = (lag + 1) * U, int(in_flight * U)
        steps = {"steps": lag + 1}
        active = int((R + 1) / 1.3)  # with a window of 0.3 times as many
        return [
            racer("serial", **steps, groups_per_round=R, groups_per_step=U),
            racer("seer", **steps, groups_per_round=R, groups_per_step=U),
            apart("rolloutpipe", **steps, groups_per_round=R, groups_per_step=U),
            apart("rolloutpipe_eager", **steps, groups_per_round=R, groups_per_step=U),
            racer("conventional", **steps, groups_per_step=U, steps_per_round=lag + 1),
            racer("sortedrl", groups_per_round=R, groups_per_step=U),
            racer("april", groups_per_round=U, groups_launched=alive, staleness=lag),
            apart("windowed_fifo", groups_per_step=U, groups_in_flight=active, window=R + 1 - active),
            apart("tailrace", groups_per_step=U, groups_in_flight=alive, staleness=lag),
        ]

    one_off = [
        apart("one_step_off", groups_per_round=U, groups_per_step=U),
        apart("streamrl_async", groups_per_round=U),
    ]
    # PipelineRL's requests of 3 U groups keep 4 to 8 U groups alive, with those that have some responses.
    in_flight = math.ceil(3 * U * K / engines)
    unbounded = [
        racer("april", groups_per_round=U, groups_launched=3 * U),
        racer("tailbatch_async", groups_per_round=U, response_speculation=1.0),
        apart(
            "pipelinerl",
            groups_per_step=U,
            in_flight_per_engine=in_flight,
            ring_groups=2 * U,
            ring_full="block",
        ),
        apart("tailrace, staleness 8", groups_per_step=U, groups_in_flight=3 * U, staleness=8),
        apart("tailrace, staleness 32", groups_per_step=U, groups_in_flight=6 * U, staleness=32),
    ]
    return {
        "on-policy": on_policy,
        "lag 1": [*bounded(1, 2.0), *one_off],
        "lag 3": bounded(3, 3.0),
        "no bound": unbounded,
    }
