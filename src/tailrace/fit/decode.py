"""The costs of an engine: decode steps, prefill, loads of weights and aborts.

A decode step takes base_s + slope_s * running + context_s * positions (sim/steps.py). The duration of a
request is the sum over its steps, and over the stalls for prefills and loads in its time. This is linear in
the costs, given how many steps each interval has. That follows from the costs (timeline.py), so both are
repeated in turn.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tailrace.fit.base import FitPart
from tailrace.fit.least_squares import Array, Mask, Solution, explained, non_negative
from tailrace.fit.observed import Observed
from tailrace.fit.overlap import Busy
from tailrace.fit.timeline import EngineTimeline
from tailrace.record.timeline import ServedRequest

REPETITIONS = 12
ALONE = 0.05
"""Share of a duration in which others may work on the host, for work that counts as undisturbed."""
MIN_OBSERVATIONS, MIN_ALONE_SHARE = 20, 0.25
"""Undisturbed requests, and their share of all, from which on only those give the undisturbed costs."""
FAST_PREFILL = 1e9
"""Positions in a second, where prefills take no measurable time."""

NAMES = {
    "base": "base_s",
    "slope": "slope_s",
    "context": "context_s",
    "prefill": "prefill_tokens_per_s",
    "load": "load_s",
}
"""The settings by the column of the fit."""


def fit_engines(run: Observed) -> FitPart:
    """Fit base_s, slope_s, context_s, prefill_tokens_per_s and load_s, and the slow-down by the trainer."""
    engines = _timelines(run)
    if not engines:
        return FitPart("decode", {}, 0, None, ["no request gained a token: [sim.engines] stays open"])
    duration_s, gained, trained_s = (
        np.concatenate([getattr(each, name) for each in engines])
        for name in ("duration_s", "gained", "trained_s")
    )
    counted = gained > 0
    is_alone = counted & (trained_s <= ALONE * duration_s)
    separable = is_alone.sum() >= max(MIN_OBSERVATIONS, MIN_ALONE_SHARE * counted.sum())
    used = is_alone if separable else counted
    cost = {"base": 1.0, "slope": 0.0, "context": 0.0, "prefill": 0.0, "load": 0.0, "slowdown": 1.0}
    for _ in range(REPETITIONS):
        each_columns = [engine.columns(cost) for engine in engines]
        columns = {name: np.concatenate([each[name] for each in each_columns]) for name in each_columns[0]}
        target = duration_s - trained_s * (1 - 1 / cost["slowdown"])
        solution = non_negative({name: column[used] for name, column in columns.items()}, target[used])
        cost |= {name: solution[name] for name in columns}
        cost["base"] = cost["base"] or 1e-9
        alone_s = sum((columns[name] * cost[name] for name in columns), np.zeros(len(gained)))
        disturbed = counted & ~is_alone
        if separable and disturbed.sum() >= MIN_OBSERVATIONS:
            cost["slowdown"] = slowdown(duration_s[disturbed], trained_s[disturbed], alone_s[disturbed])
    values = {
        "sim.engines.base_s": cost["base"],
        "sim.engines.slope_s": cost["slope"],
        "sim.engines.context_s": cost["context"],
        "sim.engines.prefill_tokens_per_s": min(1 / cost["prefill"], FAST_PREFILL)
        if cost["prefill"]
        else FAST_PREFILL,
    }
    if np.any(columns["load"][used]):
        values["sim.engines.load_s"] = cost["load"]
    if cost["slowdown"] > 1:
        values["sim.host.engine_slowdown"] = cost["slowdown"]
    fit = explained(alone_s[used], target[used])
    notes = _notes(solution, columns, used, separable, bool((counted & ~is_alone).any()))
    return FitPart("decode", values, int(used.sum()), fit, notes)


def slowdown(duration_s: Array, disturbed_s: Array, alone_s: Array) -> float:
    """Return the factor by which work is slower while others work, at least 1.

    Args:
        duration_s: of each piece of work.
        disturbed_s: the part of it in which others worked.
        alone_s: what each piece would have taken alone.
    """
    left_s = float(np.sum(alone_s - (duration_s - disturbed_s)))
    return max(1.0, float(np.sum(disturbed_s)) / left_s) if left_s > 0 else 1.0


def fit_aborts(run: Observed) -> FitPart:
    """Fit abort_s: from the reward that ends a rollout until its last requests are cancelled."""
    seconds: list[float] = []
    for process in run.processes:
        rewards = np.array([each.end_s for each in process.scorings if each.reward is not None])
        cancelled = sorted({each.end_s for each in process.requests if each.outcome == "cancelled"})
        before = np.searchsorted(rewards, cancelled, side="left")
        bursts = {
            int(index): end_s - float(rewards[index - 1])
            for index, end_s in zip(before, cancelled, strict=True)
            if index
        }
        seconds += bursts.values()
    if not seconds:
        notes = ["no request was cancelled: abort_s keeps its default"]
        return FitPart("aborts", {}, 0, None, notes)
    return FitPart("aborts", {"sim.engines.abort_s": float(np.median(seconds))}, len(seconds), None, [])


def _timelines(run: Observed) -> list[EngineTimeline]:
    found = []
    for process in run.processes:
        engines: defaultdict[str, list[ServedRequest]] = defaultdict(list)
        for request in process.requests:
            if request.duration_s > 0:
                engines[request.engine].append(request)
        training = Busy(process.trainer)
        for requests in engines.values():
            if any(each.num_gained for each in requests):
                found.append(EngineTimeline(requests, run.prompt_tokens, training, process.publications))
    return found


def _notes(
    solution: Solution, columns: dict[str, Array], used: Mask, separable: bool, overlapped: bool
) -> Sequence[str]:
    notes = []
    for name in solution.collinear:
        notes.append(
            f"{NAMES[name]} cannot be told apart from the other costs of a decode step: the batches of this "
            "run were too much alike. It is left out"
        )
    for name in ("base", "slope", "context"):
        if solution.coefficients.get(name) == 0.0:
            notes.append(f"{NAMES[name]} would be below 0, and is 0: more of it took no longer in this run")
    if not solution["prefill"] and "prefill" not in solution.collinear:
        notes.append("prefills took no measurable time")
    if not np.any(columns["load"][used]):
        notes.append("no request ran after a publication: load_s keeps its default")
    if not overlapped:
        notes.append(
            "engines and trainer never worked at the same time: how much they slow each other down is not "
            "known, and taken as nothing"
        )
    elif not separable:
        notes.append("the trainer worked nearly always: the costs of a decode step include its slow-down")
    return notes
