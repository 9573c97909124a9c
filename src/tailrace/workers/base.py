"""What a host is to the workers: which CPU each may use."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.errors import ConfigError
from tailrace.settings import Settings


class HostSettings(Settings):
    """The machine that the worker processes share."""

    pin: bool = False
    """A CPU for each engine and one for the trainer alone; the controller and the scorers share the engines'.
    What the trainer computes then takes the same time whatever else goes on. One thread each only."""

    lend: bool = False
    """While an engine has no request, a helper of the trainer computes on its CPU: when a rollout has ended,
    all devices share what remains (RollPacker 4.4). Gradients are then the same up to their rounding only.
    For a trainer of one thread on a CPU, without a critic and recomputed old policies."""


def plan_pins(settings: HostSettings, num_engines: int) -> list[int]:
    """A CPU for each engine, then one for the trainer; empty: no pinning.

    Raises:
        ConfigError: the host has fewer CPUs than that, or cannot pin.
    """
    if not settings.pin:
        return []
    cpus = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if len(cpus) <= num_engines:
        problem = f"{num_engines} engines and a trainer need as many CPUs to be pinned to, not {len(cpus)}"
        raise ConfigError("host.pin", True, problem, "switch it off, or start fewer engines")
    return cpus[: num_engines + 1]


@contextmanager
def left_to_the_trainer(pins: list[int]) -> Iterator[None]:
    """Keep this process, and what it starts without a pin, off the trainer's CPU."""
    if not pins:
        yield
        return
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus - {pins[-1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)
