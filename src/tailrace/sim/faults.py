"""Simulated engines that die at random and are started again."""

import asyncio
import math

from tailrace.sim.chance import Chance
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import SimFaultSettings

FAULT = 7
"""What a stream of chance is for, besides those of world.py and reward.py."""


def let_die(engine: SimEngine, number: int, settings: SimFaultSettings, seed: int) -> None:
    """Let an engine die after exponential times, as machines with a constant rate of faults do.

    An engine whose devices are lent does not die. Call it inside the virtual loop.

    Args:
        number: of the engine; each has its own stream of chance.
    """
    loop, chance = asyncio.get_running_loop(), Chance(FAULT, seed, number)

    def live() -> None:
        loop.call_later(-settings.mean_life_s * math.log(chance.uniform()), die)

    def die() -> None:
        if engine.state != "open":
            return live()
        engine.die()
        loop.call_later(settings.restart_s, restart)

    def restart() -> None:
        engine.revive()
        live()

    live()
