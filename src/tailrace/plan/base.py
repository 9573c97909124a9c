"""What the planner compares, and what it answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from tailrace.plan.workload import Workload
from tailrace.rollout.placement import Kind
from tailrace.schedules import SCHEDULES, Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A schedule with its parameters, and what bounds its time.

    Args:
        label: tells it from the schedule's other candidates; the same on every division of the devices.
        lag: largest age of a trained token, in optimizer steps.
        steps: optimizer steps of a round, which ends with a publication.
        alive: groups that are generated at the same time, at most.
        waited_tokens: the longest response that an optimizer step waits for, on average.
        stops: the engines wait while the trainer steps and publishes.
        cycle: rounds after which the schedule is where it began.
    """

    schedule: str
    parameters: Mapping[str, Any]
    label: str = ""
    lag: float = 0
    steps: int = 1
    alive: float = inf
    waited_tokens: Callable[[Workload], float] = lambda load: 0.0
    stops: bool = True
    cycle: int = 1

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.label}" if self.label else self.schedule

    def ready(self) -> Schedule:
        """The schedule, ready to run."""
        return partial(SCHEDULES[self.schedule], **self.parameters)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule on a division of the devices.

    Args:
        rollout_devices: devices that generate; None: all generate and train in turn.
        tensor_parallel: devices of one engine.
    """

    work: Work
    kind: Kind
    rollout_devices: int | None
    tensor_parallel: int

    @property
    def replicas(self) -> int:
        """Replicas of the trainer."""
        return 2 if self.kind == "elastic" else 1

    def name(self, devices: int) -> str:
        """The schedule and the devices in words."""
        return f"{self.work.name} ({self.division(devices)})"

    def division(self, devices: int) -> str:
        """The devices in words."""
        if self.rollout_devices is None:
            words = "in turn" if self.kind == "colocated" else "elastic"
        else:
            words = f"{self.rollout_devices} + {devices - self.rollout_devices}"
        return f"{words}, TP {self.tensor_parallel}" if self.tensor_parallel > 1 else words


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of one optimizer step of a candidate, in seconds.

    Args:
        generation_s: of the engines alone.
        training_s: of the trainer alone, optimizer step included.
        step_s: of both, as the schedule combines them.
    """

    generation_s: float
    training_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate in virtual time.

    Args:
        steps: optimizer steps of the run.
        step_s: seconds of an optimizer step.
        lag_max: largest age of a trained token, in optimizer steps; lag_mean: mean over trained tokens.
        length_bias: mean trained length over the mean length of all responses to the same prompts, minus 1.
        over_bound: time of the run over its clairvoyant lower bound (record/bounds.py), minus 1.
        wasted: tokens that were not trained, as a share of those generated.
        kv_share: KV cache that the requests in flight fill, with responses of mean length.
        trainer_share: memory of the trainer's devices that its state fills.
    """

    candidate: Candidate
    floor: Floor
    steps: int
    step_s: float
    samples_per_s: float
    lag_max: float
    lag_mean: float
    length_bias: float
    over_bound: float
    wasted: float
    kv_share: float
    trainer_share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's answer.

    Args:
        ranking: all candidates that were measured, the best first. Those that were measured over more steps
            come first.
        reasons: what limits the cluster, one sentence each.
        candidates: how many there were.
        excluded: how many of them each limit excluded, by the limit in words.
        pruned: how many were not measured, because their bound or the schedule on another division
            predicts that they lose.
    """

    ranking: Sequence[Measured]
    reasons: Sequence[str]
    candidates: int
    excluded: Mapping[str, int]
    pruned: int

    @property
    def best(self) -> Measured:
        return self.ranking[0]
