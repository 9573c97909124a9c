"""The search: bounds, then successive halving over optimizer steps in virtual time.

A candidate whose bound (bounds.py) is worse than what another one reaches cannot win. A schedule is about as
many seconds above its bound on one division of the devices as on another. So those are measured first, over
few steps, that are predicted to be the fastest. The best of them are measured over more, and the best of
these over all (successive halving; Jamieson and Talwalkar, Non-stochastic Best Arm Identification and
Hyperparameter Optimization, 2016). All candidates train the same prompts, with the same lengths of their
responses.
"""

from collections import Counter
from collections.abc import Sequence
from math import ceil, inf

from tailrace.errors import ConfigError
from tailrace.plan.base import Candidate, Measured, Plan
from tailrace.plan.candidates import LAGS
from tailrace.plan.problem import Entry, Problem
from tailrace.plan.words import reasons

RUNGS = ((1 / 8, 6), (1 / 4, 3))
"""Share of the steps over which candidates are measured, and how many of them are measured over more."""
FEWEST_STEPS = 8
"""Of the first rung."""
FILLS = 32
"""Steps of which the shares are at least, as a multiple of those in flight."""
LEAST = 8
"""Candidates that are measured at least."""
MARGIN = 1.25
"""How much slower than the best a candidate may be over few steps, or be predicted to be."""

Pair = tuple[Entry, Measured]


def search(problem: Problem) -> Plan:
    """Find the fastest candidates of a problem.

    Raises:
        ConfigError: no candidate fits the devices, or none is within the limits.
    """
    entries, excluded = problem.entries()
    (share, number), (more, last) = RUNGS
    num_excluded = excluded.total()
    first, others, biased = _promising(problem, entries, _share(problem, share))
    if not first:
        found = f"it excludes all {len(entries)} candidates that fit the devices"
        raise ConfigError("plan.max_length_bias", problem.max_length_bias, found, "raise it")
    second = _again(problem, first, number, _share(problem, more))
    final = _again(problem, second, last, problem.steps)
    if biased:
        excluded[f"plan.max_length_bias = {problem.max_length_bias:g}"] = biased
    ranking: dict[Candidate, Measured] = {}
    for entry, measured in (*final, *second, *first):
        ranking.setdefault(entry.candidate, measured)
    ranked = list(ranking.values())
    longest = [each for each in ranked if each.steps == ranked[0].steps]
    fair = [*others, *(entry for entry, _ in first)]
    floors = {entry.candidate: problem.floor(entry, problem.steps).step_s for entry in fair}
    why = reasons(problem, floors, longest)
    return Plan(ranked, why, len(entries) + num_excluded, excluded, len(others))


def is_biased(problem: Problem, measured: Measured) -> bool:
    return abs(measured.length_bias) > problem.max_length_bias


def _promising(problem: Problem, entries: Sequence[Entry], steps: int) -> tuple[list[Pair], list[Entry], int]:
    """Measure the candidates that are predicted to be within the margin of the best.

    The length bias is the schedule's, and not that of a division. One that is above the limit is not measured
    on the other divisions.

    Returns:
        Those that were measured, the best first; those that were not; how many are above the limit.
    """
    waiting, best_s = list(entries), inf
    excess_s: dict[str, float] = {}
    floors = {entry: problem.floor(entry, steps).step_s for entry in entries}
    found: list[Pair] = []
    num_biased = 0

    def predicted(entry: Entry) -> float:
        return floors[entry] + excess_s.get(entry.candidate.work.name, 0.0)

    while waiting:
        entry = min(waiting, key=predicted)
        if len(found) >= LEAST and predicted(entry) > MARGIN * best_s:
            break
        measured, name = problem.measure(entry, steps), entry.candidate.work.name
        if is_biased(problem, measured):
            others = [each for each in waiting if each.candidate.work.name != name]
            num_biased += len(waiting) - len(others)
            waiting = others
            continue
        waiting.remove(entry)
        found.append((entry, measured))
        best_s = min(best_s, measured.step_s)
        excess_s[name] = min(excess_s.get(name, inf), measured.step_s - floors[entry])
    return sorted(found, key=lambda pair: pair[1].step_s), waiting, num_biased


def _again(problem: Problem, pairs: Sequence[Pair], number: int, steps: int) -> list[Pair]:
    """Measure the best ones over more steps. The best comes first."""
    found = [(entry, problem.measure(entry, steps)) for entry in finalists(pairs, number)]
    within = [pair for pair in found if not is_biased(problem, pair[1])]
    return sorted(within, key=lambda pair: pair[1].step_s)


def finalists(pairs: Sequence[Pair], number: int) -> list[Entry]:
    """Return the best ones. At most half, rounded up, are on separate devices, or on shared ones, as long as
    there are others within the margin: what misleads about one candidate does about others like it."""
    chosen: list[Entry] = []
    alike: Counter[bool] = Counter()
    most_s = MARGIN * min((measured.step_s for _, measured in pairs), default=0.0)
    for entry, measured in pairs:
        is_separate = entry.candidate.kind == "disaggregated"
        if alike[is_separate] < ceil(number / 2) and measured.step_s <= most_s:
            alike[is_separate] += 1
            chosen.append(entry)
    chosen += [entry for entry, _ in pairs if entry not in chosen]
    return chosen[:number]


def _share(problem: Problem, share: float) -> int:
    """Return the steps of a rung: a schedule with a lag of n steps has up to n + 1 in flight, and the steps
    in which they fill up say little."""
    lag = min(problem.max_lag, max(LAGS))
    steps = max(FEWEST_STEPS, round(share * max(problem.steps, FILLS * (lag + 1))))
    return min(problem.steps, steps)
