"""What limits a cluster, in words."""

from collections.abc import Iterator, Mapping, Sequence

from tailrace.plan.base import Candidate, Measured
from tailrace.plan.problem import Problem

BUSY = 0.85
"""Share of the time from which a side counts as busy."""


def reasons(problem: Problem, floors: Mapping[Candidate, float], measured: Sequence[Measured]) -> list[str]:
    """Return what makes the best candidate the best, and what it could gain, one sentence each.

    Args:
        floors: the bounds on the seconds of a step of all candidates within the limits that fit the devices.
        measured: those that were measured over all steps, the best first.
    """
    best, least_s = measured[0], min(floors.values())
    return [
        _ratio(problem, best),
        f"no candidate has a bound below {least_s:.3g} s a step: no schedule gains more than "
        f"{max(1.0, best.step_s / least_s):.1f}x over the best, which takes {best.step_s:.3g} s",
        _bottleneck(best),
        _tail(problem),
        *_others(best, measured),
        *_on_policy(best, floors, measured),
    ]


def _devices(problem: Problem, best: Measured) -> tuple[int, int, int]:
    """Return how many devices there are, generate and train."""
    assert problem.sim.cluster
    num, generating = problem.sim.cluster.devices, best.candidate.rollout_devices
    return num, generating or num, num - (generating or 0)


def _ratio(problem: Problem, best: Measured) -> str:
    num, generating, training = _devices(problem, best)
    generation, trained = best.floor.generation_s * generating, best.floor.training_s * training
    more, less = ("generation", "the training") if generation >= trained else ("training", "the generation")
    times = max(generation, trained) / min(generation, trained)
    return (
        f"{more} is {times:.1f}x {less}: of {num} devices, a step needs at least {generation:.3g} device "
        f"seconds for generation and {trained:.3g} for training"
    )


def _bottleneck(best: Measured) -> str:
    """Which side the best candidate waits for, and what would help."""
    generating, training = best.floor.generation_s / best.step_s, best.floor.training_s / best.step_s
    shares = f"its engines are needed for {generating:.0%} of a step and its trainer for {training:.0%}"
    if best.candidate.rollout_devices is None:
        side = "generation" if generating > training else "training"
        return f"{shares}, one after the other on the same devices: {side} takes more of them"
    if max(generating, training) < BUSY:
        return f"{shares}: the rest are waits for long responses, rewards and new weights"
    if generating > training:
        return f"{shares}: generation limits it; add rollout devices"
    return f"{shares}: training limits it; add devices to the trainer"


def _tail(problem: Problem) -> str:
    load, groups = problem.load(problem.steps), problem.groups_per_step
    times = load.longest(groups) / load.mean_tokens
    number = groups * problem.run.group_size
    return f"the longest of the {number} responses of a step has {times:.1f}x the mean length"


def _others(best: Measured, measured: Sequence[Measured]) -> Iterator[str]:
    """The best on other divisions of the devices."""
    words = {"disaggregated": "on separate devices", "colocated": "in turn", "elastic": "elastic"}
    for kind, where in words.items():
        found = [each for each in measured if each.candidate.kind == kind]
        if kind != best.candidate.kind and found:
            yield f"{where} the best is {_compared(found[0], best)}"


def _on_policy(
    best: Measured, floors: Mapping[Candidate, float], measured: Sequence[Measured]
) -> Iterator[str]:
    """What staleness gains."""
    if not best.candidate.work.lag:
        return
    if found := [each for each in measured if not each.candidate.work.lag]:
        yield f"on-policy the best is {_compared(found[0], best)}"
    elif least := [floor for candidate, floor in floors.items() if not candidate.work.lag]:
        yield f"by its bound an on-policy schedule takes at least {min(least) / best.step_s:.2f}x the time"


def _compared(measured: Measured, best: Measured) -> str:
    return f"{measured.candidate.work.name}, with {measured.step_s / best.step_s:.2f}x the time"
