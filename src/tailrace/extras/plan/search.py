"""The search: bounds, a short run of the promising candidates in virtual time, a long one of the best.

What repeats in a large cluster is simulated once: both runs are of a slice of it, and then the best few are
measured whole. Schedules that move requests to other engines are left out there. A candidate that is
predicted to be slower than what another one reaches is not measured. A schedule is about as many seconds
above its estimate on one division of the devices as on another, and other parameters of a schedule with the
same lag at least half as many. So those are measured first, over few steps, that are predicted to be the
fastest; and the best of them over all steps. All candidates train the same prompts, with the same lengths of
their responses.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import get_args

from tailrace import clock
from tailrace.drivers.assembly.signals import Terminated
from tailrace.errors import ConfigError
from tailrace.extras.plan.candidates import Candidate
from tailrace.extras.plan.plan import Measured, Problem
from tailrace.rollout.placement import Kind
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
WHOLE, CLOSE = 2**16, 1.1
"""Samples of all runs of a whole cluster after those of its slices, at most; and how many times as long as
the best a candidate may be predicted to take, to have one. Predictions of slices err by some percent."""
BUSY = 0.85
"""Share of the time from which a side counts as busy."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's answer.

    Args:
        ranking: the candidates within all limits that were measured over all steps, distinct, the best first;
            those of slices after those of the whole cluster.
        reasons: what limits the cluster, one sentence each.
        candidates: how many there were.
        excluded: how many of them each limit excluded, by what they do, in words.
        pruned: how many were not measured over all steps, because they are predicted to lose.
        least_s: the least bound of a candidate on the seconds of a step.
        present: the user's present setting; None: it does not run on the cluster.
        signal: that ended the search before it was finished; the ranking is what it knew. None: none did.
    """

    ranking: Sequence[Measured]
    reasons: Sequence[str]
    candidates: int
    excluded: Mapping[str, int]
    pruned: int
    least_s: float
    present: Measured | None = None
    signal: int | None = None

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
    sims, excluded = problem.candidates(whole=whole)
    total, num_fitting, signal = len(sims) + excluded.total(), len(sims), None
    size = problem.steps * problem.samples_per_step
    num_finalists = len(sims) if whole else min(FINALISTS[1], max(FINALISTS[0], BUDGET // size))
    told, its, ranking = _Told(problem, num_finalists), None, list[Measured]()
    screening, judged = Screening(problem, sims, excluded, told), set[Candidate]()

    def is_within(measured: Measured) -> bool:
        if limit := problem.exceeded(measured):
            excluded[limit] += 1
            sims.pop(measured.candidate)
        return not limit

    try:
        its = present and told.measured(*present, problem.steps, 1)
        while order := [*sims] if whole else screening.order():
            before = excluded.total()
            for candidate in [each for each in order if each not in judged]:
                if len(ranking) == num_finalists:
                    break
                left = min(len(order) - len(judged), num_finalists - len(ranking))
                measured = told.measured(candidate, sims[candidate], problem.steps, left)
                judged.add(candidate)
                if not is_within(measured):
                    continue
                if same := next((each for each in ranking if each.looks_like(measured)), None):
                    ranking[ranking.index(same)] = replace(same, variants=(*same.variants, candidate))
                else:
                    ranking.append(measured)
            if whole or excluded.total() == before:
                break
        told.num_finalists, size = 0, problem.samples_per_step
        steps = min(problem.steps, max(FEWEST_STEPS, WHOLE // 2 // size))
        for left in range(WHOLE // (steps * size), 0, -1):
            if each := _first_of_slices(ranking):
                candidate = replace(each.candidate, slices=1)
                sims[candidate] = sims.pop(each.candidate)
                measured = told.measured(candidate, sims[candidate], steps, left)
                ranking.remove(each)
                if is_within(measured):
                    ranking.append(replace(measured, variants=each.variants))
    except Terminated as why:
        ranking = ranking or screening.within()
        if not ranking:
            raise
        signal = why.signal
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
    ranking.sort(key=lambda each: each.rank)
    floors = {each: problem.floor(each, sim, problem.steps).step_s for each, sim in sims.items()}
    pruned = total - excluded.total() - sum(1 + len(each.variants) for each in ranking)
    least_s = min(floors.values())
    return Plan(ranking, reasons(problem, floors, ranking), total, excluded, pruned, least_s, its, signal)


class _Told:
    """Measures, and tells how many were measured, the best so far, and about the time that is left.
    `num_finalists`: candidates that are still to be measured over all steps, at most."""

    def __init__(self, problem: Problem, num_finalists: int) -> None:
        self._problem, self.num_finalists = problem, num_finalists
        self._num, self._samples, self._began_s = 0, 0, clock.wall_time()
        self._best: Measured | None = None

    def measured(self, candidate: Candidate, sim: SimSettings, steps: int, left: int) -> Measured:
        """Measure a candidate. `left`: runs of so many steps that are left at most, this one included."""
        problem, words = self._problem, f"{self._num} measured"
        assert sim.cluster
        size = problem.samples_per_step // candidate.slices
        if self._best:
            name = self._best.candidate.name(sim.cluster.devices)
            words += f", best so far {name}: {self._best.step_s:.3g} s a step"
            later = problem.steps * self.num_finalists if steps < problem.steps else 0
            samples = size * (steps * left + later) + WHOLE * (candidate.slices > 1)
            words += f"; about {(clock.wall_time() - self._began_s) / self._samples * samples:.0f} s left"
        problem.progress(words)
        found = problem.measure(candidate, sim, steps)
        self._num, self._samples = self._num + 1, self._samples + steps * size
        if not problem.exceeded(found) and (not self._best or found.rank < self._best.rank):
            self._best = found
        return found


def _first_of_slices(ranking: Sequence[Measured]) -> Measured | None:
    """The best candidate of slices if it may be the best of all, which those of the whole cluster tell."""
    least_s = min((each.step_s for each in ranking if each.candidate.slices == 1), default=inf)
    close = [each for each in ranking if each.candidate.slices > 1 and each.step_s <= CLOSE * least_s]
    return min(close, key=lambda each: each.step_s, default=None)


class Screening:
    """Short runs of the candidates that are predicted to be within the margin of the best.

    The length bias is the schedule's, and not that of a division: one that is above the limit is not measured
    on the other divisions.

    Args:
        sims: loses the candidates above a limit.
        excluded: counts those above a limit.
    """

    def __init__(
        self, problem: Problem, sims: dict[Candidate, SimSettings], excluded: Counter[str], told: _Told
    ) -> None:
        self._problem, self._sims, self._excluded, self._told = problem, sims, excluded, told
        size = problem.samples_per_step
        self._steps = steps = min(problem.steps // 2, max(FEWEST_STEPS, round(SHORT / size)))
        self._estimates = {each: problem.estimate(each, sim, steps) for each, sim in sims.items()}
        self._excess_s: dict[object, float] = {}
        self._measured: dict[Candidate, Measured] = {}

    def within(self) -> list[Measured]:
        """Measured candidates within the limits, the best first."""
        found = [each for each in self._measured.values() if each.candidate in self._sims]
        return sorted(found, key=lambda each: each.step_s)

    def order(self) -> list[Candidate]:
        """Measure candidates, also those that became promising since the last call. Returns those of
        `within`."""
        self._excess_s = {}
        for each in self.within():
            self.learn(each)
        while found := self.next():
            candidate, left = found
            self._measured[candidate] = measured = self._told.measured(
                candidate, self._sims[candidate], self._steps, left
            )
            self.learn(measured)
            if limit := self._problem.exceeded(measured):
                biased = self._problem.is_biased(measured) and candidate.work.name
                for lost in [each for each in self._waiting() if each.work.name == biased] + [candidate]:
                    self._excluded[limit] += 1
                    self._sims.pop(lost)
        return [each.candidate for each in self.within()]

    def next(self) -> tuple[Candidate, int] | None:
        """The candidate that is predicted to be the best, and how many may be measured at most; None: the
        others are predicted to lose, or the budget is spent."""
        if not (waiting := self._waiting()):
            return None
        size, within = self._problem.samples_per_step, self.within()
        candidate, best_s = min(waiting, key=self.predict), min((each.step_s for each in within), default=inf)
        spent = sum(size // each.slices for each in self._measured)
        left = int((BUDGET / self._steps - spent) / (size // candidate.slices))
        if len(within) >= LEAST and (self.predict(candidate) > MARGIN * best_s or left < 1):
            return None
        return candidate, min(len(waiting), max(1, left))

    def predict(self, candidate: Candidate) -> float:
        """The seconds of a step, by the estimate, and what like ones took longer than theirs."""
        work = candidate.work
        alike_s = self._excess_s.get((work.schedule, work.lag, candidate.kind), 0.0) / 2
        return self._estimates[candidate] + self._excess_s.get(work.name, alike_s)

    def learn(self, measured: Measured) -> None:
        """Keep how much longer than its estimate a candidate took, the least of those that are like it."""
        work, kind = measured.candidate.work, measured.candidate.kind
        excess_s = max(0.0, measured.step_s - self._estimates[measured.candidate])
        for key in (work.name, (work.schedule, work.lag, kind)):
            self._excess_s[key] = min(self._excess_s.get(key, inf), excess_s)

    def _waiting(self) -> list[Candidate]:
        return [each for each in self._sims if each not in self._measured]


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
    return (
        f"the longest of the {problem.samples_per_step} responses of a step has {times:.1f}x the mean length"
    )


def _others(best: Measured, measured: Sequence[Measured]) -> Iterator[str]:
    for kind in get_args(Kind):
        found = [each for each in measured if each.candidate.kind == kind]
        if kind != best.candidate.kind and found:
            yield f"{found[0].candidate.where} the best is {_compared(found[0], best)}"


def _on_policy(
    best: Measured, floors: Mapping[Candidate, float], measured: Sequence[Measured]
) -> Iterator[str]:
    if not best.candidate.work.lag:
        return
    if found := [each for each in measured if not each.candidate.work.lag]:
        yield f"on-policy the best is {_compared(found[0], best)}"
    elif (least := min((floors[each] for each in floors if not each.work.lag), default=0.0)) > best.step_s:
        yield f"by its bound an on-policy schedule takes at least {least / best.step_s:.2f}x the time"


def _compared(measured: Measured, best: Measured) -> str:
    return f"{measured.candidate.work.name}, with {measured.step_s / best.step_s:.2f}x the time"
