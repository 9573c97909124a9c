"""The search: bounds, a short run of the promising candidates in virtual time, a long one of the best.

A candidate that is predicted to be slower than what another one reaches is not measured. A schedule is about
as many seconds above its estimate on one division of the devices as on another, and other parameters of a
schedule with the same lag at least half as many. So those are measured first, over few steps, that are
predicted to be the fastest; and the best of them over all steps. All candidates train the same prompts, with
the same lengths of their responses.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from tailrace import clock
from tailrace.errors import ConfigError
from tailrace.extras.plan.candidates import Candidate
from tailrace.extras.plan.plan import Measured, Problem, generation_seconds
from tailrace.sim.settings import SimSettings

SHORT = 4096
"""Samples of a short run, about."""
FEWEST_STEPS = 8
"""Its steps, at least."""
FINALISTS = (4, 16)
"""Distinct candidates that are measured over all steps: at least, and at most where BUDGET allows."""
LEAST = 8
"""Candidates that are measured at least."""
MARGIN = 1.4
"""A candidate is measured if it is predicted to take at most so many times as long as the best."""
BUDGET = 40_000
"""Samples of all short runs, and of all long ones, about. What is left then is not measured."""
BUSY = 0.85
"""Share of the time from which a side counts as busy."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's answer.

    Args:
        ranking: the candidates within all limits that were measured over all steps, distinct, the best first.
        reasons: what limits the cluster, one sentence each.
        candidates: how many there were.
        excluded: how many of them each limit excluded, by what they do, in words.
        pruned: how many were not measured over all steps, because they are predicted to lose.
        least_s: the least bound of a candidate on the seconds of a step.
        present: the user's present setting; None: it does not run on the cluster.
    """

    ranking: Sequence[Measured]
    reasons: Sequence[str]
    candidates: int
    excluded: Mapping[str, int]
    pruned: int
    least_s: float
    present: Measured | None = None

    @property
    def best(self) -> Measured:
        return self.ranking[0]


def search(
    problem: Problem, *, whole: bool = False, present: tuple[Candidate, SimSettings] | None = None
) -> Plan:
    """Find the fastest candidates of a problem. Raises a ConfigError if no candidate fits the devices, or
    none is within the limits.

    Args:
        whole: measure every candidate over all steps.
        present: the user's present setting, which is measured, too.
    """
    sims, excluded = problem.candidates()
    total, num_fitting, told = len(sims) + excluded.total(), len(sims), _Told(problem)
    its = present and told.measured(*present, problem.steps, 1)
    size = problem.steps * problem.groups_per_step * problem.run.group_size
    num_finalists = len(sims) if whole else min(FINALISTS[1], max(FINALISTS[0], BUDGET // size))
    ranking: list[Measured] = []
    known, judged = dict[Candidate, Measured](), set[Candidate]()
    while order := [*sims] if whole else _promising(problem, sims, known, excluded, told):
        before = excluded.total()
        for number, candidate in enumerate(each for each in order if each not in judged):
            if len(ranking) == num_finalists:
                break
            left = len(order) - number if whole else num_finalists - len(ranking)
            measured = told.measured(candidate, sims[candidate], problem.steps, left)
            judged.add(candidate)
            if limit := problem.exceeded(measured):
                excluded[limit] += 1
                sims.pop(candidate)
            elif same := next((each for each in ranking if each.looks_like(measured)), None):
                ranking[ranking.index(same)] = replace(same, variants=(*same.variants, candidate))
            else:
                ranking.append(measured)
        if whole or excluded.total() == before:
            break
    if not ranking:
        limit = max(problem.limits, key=lambda each: excluded[each])
        key, value = problem.limits[limit]
        found = f"it excludes all {num_fitting} candidates that fit the devices"
        raise ConfigError(f"plan.{key}", value, found, "lower it" if key == "min_ess" else "raise it")
    if its:
        timed = [its, *ranking]
        its, *ranking = (
            replace(each, figures=each.figures | {"times": its.step_s / each.step_s}) for each in timed
        )
    ranking.sort(key=lambda each: each.step_s)
    floors = {each: problem.floor(each, sim, problem.steps).step_s for each, sim in sims.items()}
    pruned = total - excluded.total() - sum(1 + len(each.variants) for each in ranking)
    least_s = min(floors.values())
    return Plan(ranking, reasons(problem, floors, ranking), total, excluded, pruned, least_s, its)


class _Told:
    """Measures, and tells how many were measured, the best so far, and the time that is left at most."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._began_s = problem, clock.wall_time()
        self._num = self._samples = 0
        self._best: Measured | None = None

    def measured(self, candidate: Candidate, sim: SimSettings, steps: int, left: int) -> Measured:
        """Measure a candidate. `left`: runs of so many steps that are left at most, this one included."""
        problem = self._problem
        assert sim.cluster
        size = problem.groups_per_step * problem.run.group_size
        words = f"{self._num} measured"
        if self._best:
            name = self._best.candidate.name(sim.cluster.devices)
            words += f", best so far {name}: {self._best.step_s:.3g} s a step"
            rate = (clock.wall_time() - self._began_s) / self._samples
            words += f"; at most {rate * steps * size * left:.0f} s left in this pass"
        problem.progress(words)
        found = problem.measure(candidate, sim, steps)
        self._num, self._samples = self._num + 1, self._samples + steps * size
        if not problem.exceeded(found) and found.step_s < (self._best.step_s if self._best else inf):
            self._best = found
        return found


def _promising(
    problem: Problem,
    sims: dict[Candidate, SimSettings],
    known: dict[Candidate, Measured],
    excluded: Counter[str],
    told: _Told,
) -> list[Candidate]:
    """Measure the candidates over few steps that are predicted to be within the margin of the best.

    The length bias is the schedule's, and not that of a division: one that is above the limit is not measured
    on the other divisions.

    Args:
        sims: loses the candidates above a limit.
        known: measured before, and receives those that are measured.
        excluded: counts those above a limit.

    Returns:
        The candidates that were measured and are within the limits, the best first.
    """
    step = problem.groups_per_step * problem.run.group_size
    steps = min(problem.steps // 2, max(FEWEST_STEPS, round(SHORT / step)))
    excess_s: dict[object, float] = {}
    estimates = {each: _estimate(problem, each, sim, steps) for each, sim in sims.items()}
    best_s = inf

    def predicted(candidate: Candidate) -> float:
        work = candidate.work
        alike_s = excess_s.get((work.schedule, work.lag, candidate.kind), 0.0) / 2
        return estimates[candidate] + excess_s.get(work.name, alike_s)

    def learn(measured: Measured) -> None:
        candidate = measured.candidate
        for key in (candidate.work.name, (candidate.work.schedule, candidate.work.lag, candidate.kind)):
            excess = max(0.0, measured.step_s - estimates[candidate])
            excess_s[key] = min(excess_s.get(key, inf), excess)

    for each in known:
        if each in sims:
            learn(known[each])
            best_s = min(best_s, known[each].step_s)
    while waiting := [each for each in sims if each not in known]:
        candidate, num = min(waiting, key=predicted), len(known.keys() & sims.keys())
        left = (BUDGET - len(known) * step * steps) // (step * steps)
        if num >= LEAST and (predicted(candidate) > MARGIN * best_s or left < 1):
            break
        measured = told.measured(candidate, sims[candidate], steps, min(len(waiting), max(1, left)))
        known[candidate] = measured
        learn(measured)
        if limit := problem.exceeded(measured):
            biased = problem.is_biased(measured) and candidate.work.name
            for each in [each for each in waiting if each is candidate or each.work.name == biased]:
                excluded[limit] += 1
                sims.pop(each)
        else:
            best_s = min(best_s, measured.step_s)
    within = [known[each] for each in known if each in sims]
    return [each.candidate for each in sorted(within, key=lambda each: each.step_s)]


def _estimate(problem: Problem, candidate: Candidate, sim: SimSettings, steps: int) -> float:
    """The bound of a step, and what a schedule mostly waits for besides: with a bound on lag, that the
    longest response of the steps in flight ends; on devices that both have, that half of the shorter side is
    not hidden."""
    work, floor, load = candidate.work, problem.floor(candidate, sim, steps), problem.load(steps)
    if candidate.kind == "elastic":
        return floor.step_s + min(floor.generation_s, floor.training_s) / 2
    if candidate.kind == "colocated" or work.stops or work.lag == inf:
        return floor.step_s
    num, samples = work.lag + 1, problem.groups_per_step * problem.run.group_size
    longest = load.longest(int(num) * problem.groups_per_step) / num
    return max(floor.step_s, generation_seconds(sim.engines, load, samples, longest))


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
    elif (least := _least(floors)) > best.step_s:
        yield f"by its bound an on-policy schedule takes at least {least / best.step_s:.2f}x the time"


def _least(floors: Mapping[Candidate, float]) -> float:
    """The least bound of an on-policy candidate."""
    return min((floor for candidate, floor in floors.items() if not candidate.work.lag), default=0.0)


def _compared(measured: Measured, best: Measured) -> str:
    return f"{measured.candidate.work.name}, with {measured.step_s / best.step_s:.2f}x the time"
