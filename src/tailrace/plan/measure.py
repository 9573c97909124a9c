"""A schedule in virtual time, and how far the lengths of what it trains are from those of its prompts."""

from dataclasses import dataclass
from itertools import chain
from statistics import fmean, pstdev

from tailrace.algo.compute_advantages import GRPO
from tailrace.controller.base import RunSettings
from tailrace.controller.simulation import Schedule, simulate
from tailrace.plan.workload import response_lengths
from tailrace.record.events import Event, GroupEnded, Stepped
from tailrace.record.figures import Row
from tailrace.rollout.placement import DISAGGREGATED, Shared
from tailrace.rollout.pool import ComputeAdvantages
from tailrace.sim.settings import SimSettings


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run in virtual time gave.

    Args:
        lap: the figures of the rounds after the warm-up.
        length_bias: mean trained length over the mean length of all responses to the same prompts, minus 1.
            Prompts that are in flight at the end are left out: they would be trained later.
        step_spread: standard deviation of the mean lengths of the optimizer steps, as a share of their mean.
        over_bound: time of the whole run over its clairvoyant lower bound (record/bounds.py), minus 1.
    """

    lap: Row
    length_bias: float
    step_spread: float
    over_bound: float


class TrainedLengths:
    """Sink: the lengths of the responses that each step trained, and the prompts whose groups have ended."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.ended: list[int] = []

    def on(self, event: Event) -> None:
        if isinstance(event, GroupEnded):
            self.ended.append(event.prompt)
        elif isinstance(event, Stepped):
            self.steps.append([sample.num_tokens for sample in event.samples])

    def close(self) -> None:
        """Nothing is pending."""


def measure(
    schedule: Schedule,
    sim: SimSettings,
    settings: RunSettings,
    *,
    warm_up_rounds: int,
    shared: Shared = DISAGGREGATED,
    replicas: int = 1,
    reference: bool = False,
    compute_advantages: ComputeAdvantages = GRPO,
) -> Outcome:
    """Run a schedule in virtual time.

    Args:
        settings: its rounds are those of the whole run.
        warm_up_rounds: rounds at the start that do not count.
        shared: whether engines and trainer have devices in common.
        replicas: replicas of the trainer.
        reference: whether the run has a reference model.
    """
    lengths = TrainedLengths()
    simulated = simulate(
        schedule,
        sim,
        settings,
        shared=shared,
        replicas=replicas,
        reference=reference,
        warm_up_rounds=warm_up_rounds,
        sinks=(lengths,),
        compute_advantages=compute_advantages,
    )
    lengths_of_all = response_lengths(sim, settings.group_size, lengths.ended, settings.seed)
    bias = fmean(chain.from_iterable(lengths.steps)) / fmean(chain.from_iterable(lengths_of_all)) - 1.0
    means = [fmean(step) for step in lengths.steps]
    return Outcome(simulated.lap, bias, pstdev(means) / fmean(means), simulated.over_bound)
