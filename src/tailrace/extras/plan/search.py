"""The search: bounds, a short run of the promising candidates in virtual time, a long one of the best.

A candidate whose bound (plan.py) is worse than what another one reaches cannot win. A schedule is about as
many seconds above its bound on one division of the devices as on another. So those are measured first, over
few steps, that are predicted to be the fastest; and the best of them over all steps. All candidates train the
same prompts, with the same lengths of their responses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from tailrace.errors import ConfigError
from tailrace.extras.plan.candidates import LAGS, Candidate
from tailrace.extras.plan.plan import Measured, Problem
from tailrace.sim.settings import SimSettings

SHARE = 1 / 8
"""Share of the steps over which all promising candidates are measured."""
FEWEST_STEPS = 8
"""The least of them."""
FILLS = 32
"""Steps of which they are the share at least, as a multiple of those in flight."""
FINALISTS = 6
"""Candidates that are measured over all steps."""
LEAST = 8
"""Candidates that are measured at least."""
MARGIN = 1.25
"""A candidate is kept if it is predicted to take at most so many times as long as the best."""
BUSY = 0.85
"""Share of the time from which a side counts as busy."""


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
        least_s: the least bound of a candidate on the seconds of a step.
    """

    ranking: Sequence[Measured]
    reasons: Sequence[str]
    candidates: int
    excluded: Mapping[str, int]
    pruned: int
    least_s: float

    @property
    def best(self) -> Measured:
        return self.ranking[0]


def search(problem: Problem) -> Plan:
    """Find the fastest candidates of a problem. Raises a ConfigError if no candidate fits the devices, or
    none is within the limits."""
    sims, excluded = problem.candidates()
    num_excluded = excluded.total()
    first, others, biased = _promising(problem, sims)
    if not first:
        found = f"it excludes all {len(sims)} candidates that fit the devices"
        raise ConfigError("plan.max_length_bias", problem.max_length_bias, found, "raise it")
    if biased:
        excluded[f"plan.max_length_bias = {problem.max_length_bias:g}"] = biased
    known = [each.candidate for each in first]
    final = [problem.measure(each, sims[each], problem.steps) for each in known[:FINALISTS]]
    longest = sorted((each for each in final if not is_biased(problem, each)), key=lambda each: each.step_s)
    finalists = {each.candidate for each in longest}
    ranking = [*longest, *(each for each in first if each.candidate not in finalists)]
    floors = {each: problem.floor(each, sims[each], problem.steps).step_s for each in [*others, *known]}
    why = reasons(problem, floors, longest or ranking[:1])
    return Plan(ranking, why, len(sims) + num_excluded, excluded, len(others), min(floors.values()))


def is_biased(problem: Problem, measured: Measured) -> bool:
    return abs(measured.figures["length_bias"]) > problem.max_length_bias


def _promising(
    problem: Problem, sims: Mapping[Candidate, SimSettings]
) -> tuple[list[Measured], list[Candidate], int]:
    """Measure the candidates over few steps that are predicted to be within the margin of the best.

    A schedule with a lag of n steps has up to n + 1 in flight, and the steps in which they fill up say
    little. The length bias is the schedule's, and not that of a division: one that is above the limit is not
    measured on the other divisions.

    Returns:
        Those that were measured, the best first; those that were not; how many are above the limit.
    """
    in_flight = min(problem.max_lag, max(LAGS)) + 1
    steps = max(FEWEST_STEPS, round(SHARE * max(problem.steps, FILLS * in_flight)))
    steps = min(problem.steps, steps)
    waiting, best_s = list(sims), inf
    excess_s: dict[str, float] = {}
    floors = {each: problem.floor(each, sim, steps).step_s for each, sim in sims.items()}
    found: list[Measured] = []
    num_biased = 0

    def predicted(candidate: Candidate) -> float:
        return floors[candidate] + excess_s.get(candidate.work.name, 0.0)

    while waiting:
        candidate = min(waiting, key=predicted)
        if len(found) >= LEAST and predicted(candidate) > MARGIN * best_s:
            break
        measured, name = problem.measure(candidate, sims[candidate], steps), candidate.work.name
        if is_biased(problem, measured):
            others = [each for each in waiting if each.work.name != name]
            num_biased += len(waiting) - len(others)
            waiting = others
            continue
        waiting.remove(candidate)
        found.append(measured)
        best_s = min(best_s, measured.step_s)
        excess_s[name] = min(excess_s.get(name, inf), measured.step_s - floors[candidate])
    return sorted(found, key=lambda each: each.step_s), waiting, num_biased


def reasons(problem: Problem, floors: Mapping[Candidate, float], measured: Sequence[Measured]) -> list[str]:
    """Return what makes the best candidate the best, and what it could gain, one sentence each.

    Args:
        floors: the bounds on the seconds of a step of all candidates within the limits that fit the devices.
        measured: those that were measured over all steps, the best first.
    """
    best, least_s = measured[0], min(floors.values())
    return [
        _ratio(problem),
        f"no candidate has a bound below {least_s:.3g} s a step: no schedule gains more than "
        f"{max(1.0, best.step_s / least_s):.1f}x over the best, which takes {best.step_s:.3g} s",
        _bottleneck(best),
        _tail(problem),
        *_others(best, measured),
        *_on_policy(best, floors, measured),
    ]


def _ratio(problem: Problem) -> str:
    assert problem.sim.cluster
    generation, trained = problem.device_seconds
    more, less = ("generation", "the training") if generation >= trained else ("training", "the generation")
    times = max(generation, trained) / min(generation, trained)
    return (
        f"{more} is {times:.1f}x {less}: of {problem.sim.cluster.devices} devices, a step needs at least "
        f"{generation:.3g} device seconds for generation and {trained:.3g} for training"
    )


def _bottleneck(best: Measured) -> str:
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
    words = {"disaggregated": "on separate devices", "colocated": "in turn", "elastic": "elastic"}
    for kind, where in words.items():
        found = [each for each in measured if each.candidate.kind == kind]
        if kind != best.candidate.kind and found:
            yield f"{where} the best is {_compared(found[0], best)}"


def _on_policy(
    best: Measured, floors: Mapping[Candidate, float], measured: Sequence[Measured]
) -> Iterator[str]:
    if not best.candidate.work.lag:
        return
    if found := [each for each in measured if not each.candidate.work.lag]:
        yield f"on-policy the best is {_compared(found[0], best)}"
    elif least := [floor for candidate, floor in floors.items() if not candidate.work.lag]:
        yield f"by its bound an on-policy schedule takes at least {min(least) / best.step_s:.2f}x the time"


def _compared(measured: Measured, best: Measured) -> str:
    return f"{measured.candidate.work.name}, with {measured.step_s / best.step_s:.2f}x the time"
