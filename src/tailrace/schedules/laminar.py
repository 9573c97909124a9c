"""Laminar (Sheng et al. 2025, arXiv 2510.12633): every engine takes new weights for itself.

    relay workers: an engine pulls the newest weights when it is idle    run.publish(to="idle")
    dynamic repack of the long tail                                      repack, run.move
    a sample ends on its version                                         run.declare(pinned=1)

We read the abstract and the introduction of the paper. The relays are the trainer's publication, which an
engine loads when it has no request; no engine waits for another one. When a new version is there, an engine
of an older one gets no new samples. At each publication, the samples of engines of one version that have few
left are packed onto as few of them as have the slots. The others are idle then, and pull. The paper repacks
by the use of the KV cache, and beside the publications, too.
"""

from tailrace.controller.run import Run
from tailrace.schedules.dora import of_one_version, pack
from tailrace.schedules.parameters import Bound, Count, Share
from tailrace.schedules.window import in_flight


async def laminar(
    run: Run, groups_per_step: Count, groups_in_flight: Count, staleness: Bound, repack_below: Share = 0.5
) -> None:
    """Engines pull the newest weights when they are idle; the last long samples share an engine.

    The paper has no bound on staleness; here a selection keeps one.

    Args:
        groups_per_step, groups_in_flight, staleness: as in tailrace.
        repack_below: engines with at most this share of their slots taken are packed. 0: none.
    """

    async def publish() -> None:
        await run.publish(to="idle")
        repack(run, repack_below)

    await in_flight(run, groups_per_step, groups_in_flight, staleness, pinned=1, publish=publish)


def repack(run: Run, below: float) -> None:
    """Free engines of older versions that have few samples left."""
    for engines in of_one_version(run):
        few = [engine for engine in engines if len(run.serving(engine)) <= below * engine.slots]
        if few and run.version not in run.served(few[0]):
            pack(run, few)
