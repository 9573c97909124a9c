"""A schedule in virtual time, and how far the lengths of what it trains are from those of its prompts."""

from functools import partial
from itertools import chain
from statistics import fmean

from tailrace.algo.compute_advantages import GRPO
from tailrace.controller.base import RunSettings
from tailrace.controller.simulation import simulated_parts
from tailrace.papers.runs import Schedule, simulate
from tailrace.plan.workload import response_lengths
from tailrace.record.events import Event, GroupEnded, Stepped
from tailrace.record.laps import Lap
from tailrace.rollout.placement import DISAGGREGATED, Shared
from tailrace.rollout.pool import ComputeAdvantages
from tailrace.sim.settings import SimSettings

WARM_UP = 0.25
"""Share of the rounds that does not count: a schedule that never stops begins with short responses."""


class TrainedLengths:
    """Sink: the lengths of the trained responses, and the prompts whose groups have ended."""

    def __init__(self) -> None:
        self.trained: list[int] = []
        self.ended: list[int] = []

    def on(self, event: Event) -> None:
        if isinstance(event, GroupEnded):
            self.ended.append(event.prompt)
        elif isinstance(event, Stepped):
            self.trained += [sample.num_tokens for sample in event.samples]

    def close(self) -> None:
        """Nothing is pending."""


def measure(
    schedule: Schedule,
    sim: SimSettings,
    settings: RunSettings,
    *,
    shared: Shared = DISAGGREGATED,
    replicas: int = 1,
    reference: bool = False,
    compute_advantages: ComputeAdvantages = GRPO,
) -> tuple[Lap, float]:
    """Run a schedule in virtual time; return its figures after the warm-up, and its length bias.

    The length bias is the mean length of the trained responses over the mean length of all responses to the
    same prompts, minus 1. Prompts that are in flight at the end of a run are left out: they would be trained
    later.

    Args:
        settings: its rounds are those of the whole run.
        shared: whether engines and trainer have devices in common.
        replicas: replicas of the trainer.
        reference: whether the run has a reference model.
    """
    lengths = TrainedLengths()
    parts = partial(
        simulated_parts, sim, settings.seed, shared=shared, replicas=replicas, reference=reference
    )
    simulated = simulate(
        schedule,
        sim,
        settings,
        warm_up_rounds=round(WARM_UP * settings.rounds),
        sinks=(lengths,),
        parts=parts,
        compute_advantages=compute_advantages,
    )
    all_lengths = chain.from_iterable(
        response_lengths(sim, settings.group_size, lengths.ended, settings.seed)
    )
    return simulated.lap, fmean(lengths.trained) / fmean(all_lengths) - 1.0
