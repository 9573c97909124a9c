"""DORA (2026, arXiv 2604.26256): multi-version streaming rollout.

    a sample ends on its version (intra-trajectory policy consistency)    run.declare(pinned=1)
    no sample is discarded, staleness is bounded (data integrity)         window
    engines are divided among the versions again at each publication      divide, run.move
    the freed engines serve the new version                               run.publish(to=freed)

We read the abstract of the paper and summaries of it. A central balancer divides the engines among the
versions, and moves samples between engines of one version, whose KV caches are equal. The rule of the
division is ours: an old version keeps the fewest engines whose slots hold its samples. New samples begin on
the newest version only. The paper also gives new samples to older versions where the bound allows it.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil

from tailrace.contracts.engine import Engine
from tailrace.controller.run import Run
from tailrace.schedules.parameters import Bound, Count
from tailrace.schedules.window import in_flight


async def dora(run: Run, groups_per_step: Count, groups_in_flight: Count, staleness: Bound) -> None:
    """Several versions are served at a time; the engines of an old one become fewer as its samples end.

    Args:
        groups_per_step, groups_in_flight, staleness: as in tailrace.
    """
    publish = partial(divide_and_publish, run)
    await in_flight(run, groups_per_step, groups_in_flight, staleness, pinned=1, publish=publish)


async def divide_and_publish(run: Run) -> None:
    await run.publish(to=divide(run) or "idle")


def divide(run: Run) -> list[Engine]:
    """The engines that the served versions do not need. Their samples move to others of the same version."""
    return [engine for group in of_one_version(run) for engine in pack(run, group)]


def of_one_version(run: Run) -> list[list[Engine]]:
    """The open engines by the version that they serve."""
    engines = [engine for engine in run.engines if engine.state == "open" and run.served(engine)]
    versions = dict.fromkeys(run.served(engine) for engine in engines)
    return [[engine for engine in engines if run.served(engine) == version] for version in versions]


def pack(run: Run, engines: Sequence[Engine]) -> list[Engine]:
    """Move the samples of engines of one version onto as few of them as have the slots, and return the
    others. The engines with most samples stay, so the fewest move."""
    engines = sorted(engines, key=lambda engine: -len(run.serving(engine)))
    num_samples = sum(len(run.serving(engine)) for engine in engines)
    num_kept = ceil(num_samples / min(engine.slots for engine in engines))
    kept, freed = engines[:num_kept], engines[num_kept:]
    room = [engine for engine in kept for _ in range(engine.slots - len(run.serving(engine)))]
    leaving = [sample for engine in freed for sample in run.serving(engine)]
    for sample, engine in zip(leaving, room, strict=False):
        run.move(sample, engine)
    return freed
